"""What a server is told of its look-ups: on_compile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import needs_nvrtc
from tiny import SM_90, tiny

import jitkern
from jitkern.cache import get
from jitkern.cache.get import LookupEvent
from jitkern.cache.store import Cache
from jitkern.errors import CompileError, FrozenError


@pytest.fixture
def events() -> Iterator[list[LookupEvent]]:
    told: list[LookupEvent] = []
    stop = jitkern.on_compile(told.append)
    yield told
    stop()
    assert not get._callbacks, "another test has left a callback behind"


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
    published = Cache(empty_cache).publish(tiny().key(SM_90), "nvrtc-99.9", {"tiny.cubin": b"x"})
    jitkern.freeze()
    with caplog.at_level(logging.ERROR, logger="jitkern"):
        assert tiny().image(SM_90) == published.data
    (record,) = caplog.records
    assert record.getMessage().startswith("jitkern: on_compile: <function ")
    assert record.getMessage().endswith(
        "broken at " + hex(id(broken)) + "> failed; the look-up goes on"
    )
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
    assert len(events) == 2  # registered twice, told twice; and what comes behind is told
    for stop in (*stops, *stops):  # twice does no harm
        stop()
    tiny().image(SM_90)
    assert len(events) == 3
