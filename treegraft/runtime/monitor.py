"""What the clock is watched for while a text is decoded: drafting that does not pay, and a machine that has drifted.

Neither touches the text. The monitor changes what is drafted, so it stays out of runs that a replay must repeat; drift
is only reported, and no decision of a schedule ever depends on the clock (spec section 7).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

from treegraft.runtime.decode import AUTOREGRESSIVE, Decoded, Drop, Plan, Round
from treegraft.runtime.scheduler import Artifact, Mask

WINDOW = 16  # rounds between verdicts
PROBES = 3  # one-token steps that a window is compared with
MARGIN = 1.05  # a window is slower where it takes longer than this times the one-token steps' time
FIRST_ROUNDS = 32  # what drift is measured over
LEAST_CALLS = 4  # rounds with a medium call, below which there is no measurement
DRIFT = 1.5  # an artifact is trusted where T_tgt / T_mid is its own up to this factor


def round_ms(done: Round) -> float:
    """What a round took, in ms."""
    return sum(done.ms.values())


@dataclass
class Monitor:
    """Names the plan of a text's next round: `plan`, until that makes the text slower than one-token steps.

    After a window of rounds it takes a few one-token steps and compares the times a token; where drafting lost, the
    text goes on with `small`, and where that loses too, with one-token steps. Later windows are compared with the same
    steps, and new ones are taken before any drop. Each drop is noted in the answer. One monitor watches one text.
    """

    plan: Plan
    cost: Callable[[Round], float] = round_ms
    one_token_ms: float = 0.0
    _since: int = field(default=0, init=False)  # rounds before this window

    def __call__(self, decoded: Decoded) -> Plan:
        """The next round's plan, given the answer so far."""
        rounds = decoded.rounds[self._since :]
        if not self.plan.drafting.depth or len(rounds) < WINDOW:
            return self.plan
        window, probes = rounds[:WINDOW], rounds[WINDOW:]
        ms = sum(map(self.cost, window)) / sum(done.accepted + 1 for done in window)
        slower = ms > MARGIN * self.one_token_ms
        if slower and len(probes) < PROBES:
            return AUTOREGRESSIVE
        if probes:
            self.one_token_ms = median(map(self.cost, probes))
            if ms > MARGIN * self.one_token_ms:
                self.plan = self._next()
                decoded.drops.append(Drop(len(decoded.tokens) - 1, self.plan.name, ms, self.one_token_ms))
        self._since = len(decoded.rounds)
        return self.plan

    def _next(self) -> Plan:
        """The plan below the present one."""
        if self.plan.schedule == Mask(0):
            return AUTOREGRESSIVE
        return replace(self.plan, name="small", schedule=Mask(0))


def measure_drift(decoded: Decoded, plan: Plan, prompt_length: int) -> float | None:
    """T_tgt / T_mid over the first rounds, as a multiple of what the plan's own latency profile expects of them.

    Each forward is compared with the profile at its own tokens and context, so that trees of any size tell. None where
    the plan has no profile, or too few of those rounds called the medium drafter.
    """
    profile = plan.cut.profile
    if profile is None:
        return None
    targets, mediums = [], []
    for done in decoded.rounds[:FIRST_ROUNDS]:
        context = prompt_length + done.position
        targets.append(done.ms["target"] / max(float(profile.target(done.kept + 1, context)), 1e-9))
        expected = profile.calls_ms(done.tokens, done.lag, context)
        if expected:
            expected += profile.medium_step_ms * sum(map(bool, done.tokens))
            mediums.append(done.ms["medium"] / expected)
    if len(mediums) < LEAST_CALLS or not median(mediums):
        return None
    return median(targets) / median(mediums)


def watch_drift(decoded: Decoded, plan: Plan, prompt_length: int) -> None:
    """Note an artifact's drift in the answer, and warn where it is more than the factor DRIFT either way."""
    if not isinstance(plan.schedule, Artifact):
        return
    decoded.drift = measure_drift(decoded, plan, prompt_length)
    if decoded.drift is not None and not 1 / DRIFT <= decoded.drift <= DRIFT:
        # Without figures, so that Python shows it once; they are in the answer.
        warnings.warn(
            f"{plan.name} was learned where a medium call costs another part of a target forward than it does here, so "
            "its calls may not pay (the text is exact all the same). To adapt it, run `treegraft profile --out "
            "latency.json` here and learn again from the same log: `treegraft fit-value --log LOG --latency "
            "latency.json --out value`, then `treegraft distill --value value --out scheduler.json`",
            stacklevel=2,
        )
