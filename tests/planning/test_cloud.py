import pytest

import penstock as ps
from penstock.planning.catalogue import Catalogue
from penstock.planning.cloud import Cloud, Instance


@pytest.mark.parametrize("price", [0, -1, float("nan")])
def test_a_price_that_is_not_above_0_is_refused(price):
    with pytest.raises(ps.StudyError, match=r"mine: the on-demand price must be above 0 an hour"):
        Instance("mine", "gpu", 1, 1, {"on-demand": price})


def test_settings_of_a_cloud_that_make_no_sense_are_refused():
    offers = Catalogue.read().cloud(["p3.8xlarge"]).offers
    for settings, said in (({"billing": "hour"}, "billing"), ({"minimum": -1}, "minimum"), ({"most": 0}, "most")):
        with pytest.raises(ps.StudyError, match=said):
            Cloud(offers, **settings)
