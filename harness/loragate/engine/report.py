"""What the judge says of an engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from loragate.core.sequential import Decision, SequentialTest
from loragate.engine.verdicts import MOST_NEAR_TIES, MatchRatio

# who says a token: the model without an adapter, and the model whose drafts are verified
BASE, DRAFT = "base", "draft"
# of texts that are not equal: one in 200 may differ by a near tie
_TEXTS = SequentialTest(healthy=0.005, defective=0.05)


@dataclass(frozen=True, slots=True)
class Defect:
    """A request with wrong tokens.

    position, token, wanted, gap: of the first one, from 0; gap is how far the logit of the token is
    below that of the wanted one. token is None where it is missing, wanted and gap where no model
    can read on.
    said_by: adapters, BASE or DRAFT, whose tokens the wrong ones are.
    answer_to: the request that this completion is a right answer to.
    """

    request: int
    adapter: str | None
    position: int
    token: int | None
    wanted: int | None
    gap: float | None
    wrong_tokens: int
    said_by: tuple[str, ...]
    answer_to: int | None

    def line(self) -> str:
        said = "is missing" if self.token is None else f"is {self.token}"
        wanted = "" if self.wanted is None else f", not {self.wanted} (by {self.gap:.3g})"
        if self.token == self.wanted is not None:
            wanted = ", behind the end of the answer"
        source = " or ".join(self.said_by) or "none of the models"
        if self.answer_to is not None:
            source += f"; it answers request {self.answer_to}"
        name = f"request {self.request} ({self.adapter or BASE})"
        first = f"token {self.position} {said}{wanted}"
        return f"{name}: {first}; {self.wrong_tokens} wrong, said by {source}"


@dataclass(frozen=True, slots=True)
class WrongLogprobs:
    """A request whose tokens are right, and the probabilities that it has for them are not.

    position, given, wanted: of the first one, from 0. worst: the largest difference.
    said_by: adapters or BASE, whose probabilities for these tokens the wrong ones are.
    """

    request: int
    adapter: str | None
    position: int
    given: float
    wanted: float
    wrong_tokens: int
    worst: float
    said_by: tuple[str, ...]

    def line(self) -> str:
        source = " or ".join(self.said_by) or "none of the models"
        return (
            f"request {self.request} ({self.adapter or BASE}): token {self.position} has the "
            f"log-probability {self.given:.4g}, not {self.wanted:.4g}; {self.wrong_tokens} wrong "
            f"(by up to {self.worst:.3g}), said by {source}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Of `tokens` of `requests`. noise: the largest difference of two logits that is a near tie;
    measured: what it would be without a limit. matches: requests whose text is the one that the
    reference generates itself. wrong_logprobs: of requests without a defect of their tokens, by
    more than `log_odds_noise`."""

    tokens: int
    near_ties: int
    noise: float
    measured: float
    defects: tuple[Defect, ...]
    requests: int
    matches: int
    log_odds_noise: float = 0.0
    wrong_logprobs: tuple[WrongLogprobs, ...] = ()

    @property
    def problems(self) -> tuple[Defect | WrongLogprobs, ...]:
        """All that is wrong, tokens first."""
        return (*self.defects, *self.wrong_logprobs)

    @property
    def decision(self) -> Decision:
        """Undecided where more than MOST_NEAR_TIES of the tokens are near ties."""
        if self.problems:
            return Decision.FAIL
        near = self.near_ties > MOST_NEAR_TIES * self.tokens
        return Decision.UNDECIDED if near else Decision.PASS

    def said_by(self, adapter: str | None) -> tuple[str, ...]:
        """Those who say the wrong tokens of all defective requests of an adapter. One request may
        name somebody by chance: a broken adapter says some word, too."""
        own = [defect.said_by for defect in self.defects if defect.adapter == adapter]
        return tuple(name for name in own[0] if all(name in names for names in own)) if own else ()

    @property
    def ratio(self) -> MatchRatio:
        return MatchRatio.counted(self.matches, self.requests)

    @property
    def texts(self) -> Decision:
        """What the rate of equal texts alone would say."""
        return _TEXTS.decide(self.requests - self.matches, self.requests)

    def lines(self) -> list[str]:
        ratio, rate = self.ratio, f"{self.ratio.low:.1%} to {self.ratio.high:.1%}"
        return [
            f"{self.decision.value}: {self.tokens} tokens of {self.requests} requests, "
            f"{len(self.defects)} requests with defects, {self.near_ties} near ties "
            f"(up to {self.noise:.3g}; measured {self.measured:.3g})",
            f"equal texts: {ratio.matches} of {ratio.requests}, {rate}; "
            f"sequential test: {self.texts.value}",
            *(found.line() for found in self.problems),
        ]
