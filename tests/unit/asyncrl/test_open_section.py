"""Sections with sub-sections that exist only where their part is chosen."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from pydantic import Field, ValidationError

from asyncrl.config.sections import OpenSection, Section
from asyncrl.plugins import Part, Parts


class Gae(Section):
    lam: float = Field(default=0.95, ge=0, le=1)


class Luffy(Section):
    gamma: float = 0.1


SECTIONS = {"grpo": None, "gae": Gae, "luffy": Luffy}


class Algorithm(OpenSection):
    choices: ClassVar = {
        "estimator": Parts(
            "learner_engines",
            "algorithm.estimator",
            Part,
            {name: Part(implementation="", section=section) for name, section in SECTIONS.items()},
        )
    }
    estimator: str = "grpo"


def test_a_chosen_part_has_its_settings_and_no_other_has() -> None:
    config = Algorithm.model_validate({"estimator": "gae", "gae": {"lam": 0.5}})
    assert config.settings_of(Gae).lam == 0.5
    assert Algorithm.model_validate({"estimator": "gae"}).settings_of(Gae) == Gae()
    with pytest.raises(LookupError, match="Luffy"):
        config.settings_of(Luffy)
    with pytest.raises(LookupError, match="Gae"):
        Algorithm().settings_of(Gae)


def test_what_was_written_out_is_read_again_as_the_same() -> None:
    config = Algorithm.model_validate({"estimator": "gae", "gae": {"lam": 0.5}})
    written = config.model_dump(mode="json")
    assert written == {"estimator": "gae", "gae": {"lam": 0.5}}
    assert Algorithm.model_validate(written) == config


@pytest.mark.parametrize(
    ("given", "place", "kind"),
    [
        ({"luffy": {"gamma": 1}}, ("luffy",), "unchosen_section"),
        ({"estimator": "gae", "luffy": {}}, ("luffy",), "unchosen_section"),
        ({"estimator": "gae", "gae": {"lam": 2}}, ("gae", "lam"), "less_than_equal"),
        ({"estimator": "gae", "gae": {"lamb": 1}}, ("gae", "lamb"), "extra_forbidden"),
        ({"other": 1}, ("other",), "extra_forbidden"),
    ],
)
def test_mistakes_are_located(given: dict[str, Any], place: tuple[str, ...], kind: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Algorithm.model_validate(given)
    (error,) = caught.value.errors()
    assert (error["loc"], error["type"]) == (place, kind)
