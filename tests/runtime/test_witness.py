"""What the witness keeps of calls, and what it tells of them."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest
import torch

from weightprep.runtime import witness
from weightprep.runtime.witness import Event


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """The events of a process that was told of none before."""
    monkeypatch.setattr(witness, "_announced", set())
    witness.reset()
    events: list[Event] = []
    witness.announce(events.append)
    yield events
    witness.announce(None)
    witness.reset()


def test_calls_are_counted_by_kind_of_layer(told: list[Event]) -> None:
    for operation, layer, calls in (("q", "decoder", 3), ("q", "nextn", 1), ("v", "decoder", 2)):
        with witness.calling(operation, layer):
            for _ in range(calls):
                witness.count("absorb/torch")
    witness.count("absorb/torch")
    assert witness.counts_by_layer() == {
        ("absorb/torch", "decoder"): 5,
        ("absorb/torch", "nextn"): 1,
        ("absorb/torch", ""): 1,
    }
    assert witness.counts() == {"absorb/torch": 7}


def test_each_event_is_told_once(told: list[Event]) -> None:
    for _ in range(3):
        with witness.calling("q", "decoder"):
            witness.count("absorb/torch")
        with witness.calling("q", "nextn"):
            witness.count("absorb/torch")
        witness.decline("q", "too many rows")
        # a reset, as after warm-up, is no reason to say it again
        witness.reset()
    assert told == [
        Event("absorb/torch", "q", "decoder"),
        Event("absorb/torch", "q", "nextn"),
        Event("q", reason="too many rows"),
    ]


def test_what_was_counted_in_silence_is_told_when_it_happens_again(told: list[Event]) -> None:
    witness.announce(None)
    witness.count("absorb/torch")
    witness.announce(told.append)
    assert told == []
    witness.count("absorb/torch")
    assert told == [Event("absorb/torch")]


def test_the_caller_is_forgotten_after_a_failure(told: list[Event]) -> None:
    with pytest.raises(ZeroDivisionError), witness.calling("q", "decoder"):
        raise ZeroDivisionError
    witness.count("after")
    assert witness.counts_by_layer() == {("after", ""): 1}


def test_another_thread_has_another_caller(told: list[Event]) -> None:
    with witness.calling("q", "decoder"):
        other = Thread(target=witness.count, args=("elsewhere",))
        other.start()
        other.join()
    assert witness.counts_by_layer() == {("elsewhere", ""): 1}


def test_nothing_is_told_while_a_caller_is_traced(told: list[Event]) -> None:
    def called(x: torch.Tensor) -> torch.Tensor:
        with witness.calling("q", "decoder"):
            witness.count("absorb/torch")
            return x + 1

    x = torch.ones(2)
    assert torch.equal(torch.compile(called, backend="eager", fullgraph=True)(x), x + 1)
    assert told == []
    assert witness.counts() == {}
