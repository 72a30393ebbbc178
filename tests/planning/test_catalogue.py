"""Penstock's catalogue of instance types, a user's over it, and mistakes in one: one message, with the file's name."""

import pytest

import penstock as ps
from penstock.planning.catalogue import Catalogue
from penstock.planning.draws import Draws

RACK = {"name": '"rack"', "type": '"h200"', "devices": 8, "memory": 141, "price": 9.5}


def instance(**changes):
    """An [[instance]] with some values changed; without those that are None."""
    lines = [f"{key} = {value}" for key, value in {**RACK, **changes}.items() if value is not None]
    return "\n".join(["[[instance]]", *lines])


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


def test_a_type_with_a_price_of_the_spot_market_alone_is_for_plans_that_may_use_it(tmp_path):
    own = Catalogue.read(write(tmp_path / "own.toml", instance(price=None, spot=2.0)))
    assert [offer.name for offer in own.cloud(["rack"], spot=True).offers] == ["rack spot"]
    with pytest.raises(ps.StudyError, match=r"rack has no on-demand price: allow the spot market with spot=True"):
        own.cloud(["rack"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty. Give an [[instance]] with name, type, devices, memory and price, or a [cloud]"),
        (instance(name="[3"), "cannot be read (Unclosed array (at line 3, column 1)): it is TOML with an [[instance]]"),
        (instance(price=None), "rack has no price: an instance type has name, type, devices, memory and price."),
        (instance(name=None, type=None), "the [[instance]] of number 1 has no name and type: an instance type has"),
        (instance(prize=9), "rack has 'prize' (did you mean 'price'?), but can have name, type, devices, memory,"),
        (instance(price=0), "rack: the on-demand price must be above 0 an hour, got 0."),
        (instance(spot=-1), "rack: the spot price must be above 0 an hour, got -1."),
        (instance(price='"9.5"'), "rack: the on-demand price must be above 0 an hour, got '9.5'."),
        (instance(devices=1.5), "rack: devices must be a whole number above 0, got 1.5."),
        (instance(memory='"141 GB"'), "rack: memory must be above 0 GB a device, got '141 GB'."),
        (instance(losses='"few"'), "rack: losses must be 0 or more an hour, got 'few'."),
        (instance(type=200), 'rack: type must be a text in quotes, such as "v100", got 200.'),
        (instance(name=7), 'the [[instance]] of number 1: name must be a text in quotes, such as "v100", got 7.'),
        (instance() + "\n" + instance(), "rack is there twice: keep one [[instance]] of that name."),
        ("[instance]\nname = 'x'", "an instance type must be a table of its own, which begins with [[instance]]."),
        ("cloud = 3", "cloud must be a table, which begins with [cloud], got 3."),
        ("[cluod]", "it has 'cluod' (did you mean 'cloud'?), but can have [[instance]] and cloud alone."),
        ("[cloud]\nbiling = 1", "[cloud] has 'biling' (did you mean 'billing'?), but can have billing, minimum,"),
        ("[cloud]\nbilling = 'hour'", 'billing must be "instance" or "function", got \'hour\'.'),
        ("[cloud]\nminimum = 'long'", "minimum must be 0 or more, got 'long'."),
        ("[cloud]\nmost = 0", "most must be a whole number of nodes above 0, got 0."),
        ("[cloud]\ncurrency = 3", 'currency must be a text in quotes, such as "USD", got 3.'),
        ("[cloud]\narrival = 'soon'", "arrival must be seconds, or a table of mean and std in seconds, got 'soon'."),
        ("[cloud]\narrival = {men = 5}", "arrival must be seconds, or a table of mean and std in seconds, got {'men'"),
        ("[cloud]\npreparing = -1", "preparing: Seconds must have a mean of 0 or more"),
    ],
)
def test_a_catalogue_with_a_mistake_is_refused_with_one_message(tmp_path, text, said):
    own = write(tmp_path / "own.toml", text)
    with pytest.raises(ps.StudyError) as refused:
        Catalogue.read(own)
    assert str(refused.value).startswith(f"The catalogue {own}")
    assert said in str(refused.value)
