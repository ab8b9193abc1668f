"""What a server is told of its look-ups: on_compile, and freeze in the mode that only warns."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import needs_nvrtc
from tiny import SM_90, tiny

import jitkern
from jitkern.cache import get, stats
from jitkern.cache.entry import new_entry
from jitkern.cache.stats import LookupEvent
from jitkern.cache.store import Cache
from jitkern.env import settings
from jitkern.errors import CompileError, FrozenError


@pytest.fixture
def events() -> Iterator[list[LookupEvent]]:
    told: list[LookupEvent] = []
    stop = jitkern.on_compile(told.append)
    yield told
    stop()
    assert not stats._callbacks, "another test has left a callback behind"


@needs_nvrtc
def test_every_look_up_is_told_but_what_is_in_memory(
    folder: Path, events: list[LookupEvent]
) -> None:
    for _ in range(2):
        module = tiny()
        module.image(SM_90)
        module.image(SM_90)
    assert [event.source for event in events] == ["compiled", "cached"]
    for event in events:
        assert (event.name, event.args, event.arch) == ("tiny", ("4",), "9.0")
        assert (event.route, event.error) == ("device", None)
        assert event.key == str(tiny().key(SM_90))
        assert event.variant.startswith("nvrtc-")
        assert event.seconds > 0


@needs_nvrtc
def test_a_failure_is_told_with_its_error(folder: Path, events: list[LookupEvent]) -> None:
    (folder / "half.cuh").write_text("nonsense\n")
    with pytest.raises(CompileError) as raised:
        tiny().image(SM_90)
    jitkern.freeze()
    with pytest.raises(FrozenError) as frozen:
        tiny(6).image(SM_90)
    assert [event.source for event in events] == ["failed", "failed"]
    assert [event.error for event in events] == [raised.value, frozen.value]


def test_what_a_callback_raises_breaks_no_build(
    folder: Path,
    empty_cache: Path,
    events: list[LookupEvent],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(event: LookupEvent) -> None:
        raise KeyError(event.name)

    stops = [jitkern.on_compile(callback) for callback in (broken, events.append)]
    built = new_entry(tiny().key(SM_90), "nvrtc-99.9", {"tiny.cubin": b"x"})
    published = Cache(empty_cache).publish(built)
    jitkern.freeze()
    with caplog.at_level(logging.ERROR, logger="jitkern"):
        assert tiny().image(SM_90) == published.data
    (record,) = caplog.records
    said = f"jitkern: on_compile: {broken!r} failed; the look-up goes on"
    assert record.getMessage() == said
    assert record.exc_info is not None and record.exc_info[0] is KeyError
    assert len(events) == 2  # registered twice, told twice; and what comes behind is told
    for stop in (*stops, *stops):  # twice does no harm
        stop()
    tiny().image(SM_90)
    assert len(events) == 3


@needs_nvrtc
@pytest.mark.parametrize("by", ["the call", "the environment"])
def test_frozen_to_warn_compiles_and_says_so_once(
    folder: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "the call":
        jitkern.freeze(mode="warn")
    else:
        monkeypatch.setenv("JITKERN_FREEZE", "warn")
        settings.cache_clear()
    shipped = Path(sys.modules["jitkern"].__file__ or "").parent / "_prebuilt"
    with pytest.warns(RuntimeWarning) as caught:
        assert tiny(5).image(SM_90)
    (warning,) = caught
    key = tiny(5).key(SM_90)
    (variant,) = (path.name for path in (empty_cache / "v1" / str(key)).iterdir())
    assert str(warning.message) == (
        f"jitkern: {key}/{variant}: not found in {empty_cache}, {shipped}, and jitkern is frozen "
        "to warn: it is compiled now; record a run with JITKERN_RECORD=FILE and build it "
        "beforehand with: jitkern warm --replay FILE --arch 9.0"
    )
    Cache(empty_cache).clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny(5).image(SM_90)  # compiled again, and not said again


def test_an_unknown_mode_freezes_nothing() -> None:
    with pytest.raises(ValueError) as raised:
        jitkern.freeze("sometimes")  # type: ignore[arg-type]
    assert str(raised.value) == "freeze: mode: 'sometimes', expected raise or warn"
    assert get._freeze_mode() is None
