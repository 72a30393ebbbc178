import pytest

import penstock as ps
from penstock.planning.cloud import Catalogue, Cloud, Instance
from penstock.planning.draws import Draws


def write(path, text):
    path.write_text(text)
    return path


def test_every_type_of_the_catalogue_has_a_dated_price_and_three_providers_are_there():
    instances = Catalogue.read().instances.values()
    assert {one.provider for one in instances} == {"aws", "gcp", "azure"}
    assert all(one.dated and one.prices["on-demand"] > 0 and one.memory > 1e9 for one in instances)
    assert all(one.prices["spot"] < one.prices["on-demand"] for one in instances if "spot" in one.prices)
    assert all((one.losses > 0) == ("spot" in one.prices) for one in instances)


def test_a_users_file_comes_over_the_catalogue(tmp_path):
    own = write(
        tmp_path / "own.toml",
        """
        [cloud]
        arrival = 15
        preparing = {mean = 5, std = 1}
        [[instance]]
        name = "rack"
        type = "h200"
        devices = 8
        memory = 141
        price = 9.5
        [[instance]]
        name = "p3.8xlarge"
        type = "v100"
        devices = 4
        memory = 16
        price = 7.5
        """,
    )
    catalogue = Catalogue.read(own)
    cloud = catalogue.cloud(["rack", "p3.8xlarge", "p3.2xlarge"], spot=True, most=3)
    assert [(offer.name, offer.price) for offer in cloud.offers] == [
        ("rack on-demand", 9.5),
        ("p3.8xlarge on-demand", 7.5),
        ("p3.2xlarge on-demand", 3.06),
        ("p3.2xlarge spot", 0.3841),
    ]
    assert (cloud.arrival, cloud.preparing, cloud.minimum, cloud.most) == (Draws(15), Draws(5, 1), 60.0, 3)
    assert cloud.offers[0].instance.provider == "own"
    assert (cloud.offers[2].losses, cloud.offers[3].losses) == (0.0, 0.05)


def test_an_unknown_type_is_refused_with_the_nearest_names():
    with pytest.raises(ps.StudyError, match=r"no instance type 'p3\.9xlarge': the nearest are p3\."):
        Catalogue.read().find("p3.9xlarge")


def test_no_type_at_all_is_refused():
    with pytest.raises(ps.StudyError, match="no instance type to plan with"):
        Catalogue.read().cloud([])
    with pytest.raises(ps.StudyError, match="The catalogue has no instance type"):
        Catalogue({}).find("p3.8xlarge")


@pytest.mark.parametrize("price", [0, -1, float("nan")])
def test_a_price_that_is_not_above_0_is_refused(price):
    with pytest.raises(ps.StudyError, match=r"mine: the on-demand price must be above 0 an hour"):
        Instance("mine", "gpu", 1, 1, {"on-demand": price})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": ""}, r"own\.toml cannot be read"),
        ({"cloud": "[cloud]\nbiling = 1"}, r"has 'biling', which is none of its settings"),
        ({"cloud": "[cloud]\narrival = -1"}, r"mean of 0 or more"),
        ({"cloud": "[cluod]"}, r"has 'cluod'"),
    ],
)
def test_a_damaged_catalogue_is_refused(tmp_path, settings, said):
    text = settings.get("cloud", "[[instance]]\nname = 'x'")
    with pytest.raises(ps.StudyError, match=said):
        Catalogue.read(write(tmp_path / "own.toml", text))


def test_settings_of_a_cloud_that_make_no_sense_are_refused():
    offers = Catalogue.read().cloud(["p3.8xlarge"]).offers
    for settings, said in (({"billing": "hour"}, "billing"), ({"minimum": -1}, "minimum"), ({"most": 0}, "most")):
        with pytest.raises(ps.StudyError, match=said):
            Cloud(offers, **settings)
