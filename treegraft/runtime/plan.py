"""From what a user names (a schedule, a cut) to a plan that the decoder and the replay follow."""

import math
from pathlib import Path
from typing import Any

from treegraft.runtime.decode import AUTOREGRESSIVE, Plan
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import LatencyProfile
from treegraft.runtime.models import Model
from treegraft.runtime.scheduler import Artifact, Mask, ScheduleError, load_artifact, parse_mask
from treegraft.runtime.size import Cut

DEFAULT_CUT = Cut("score", log_s=-2.5)  # where no latency profile says what a node costs


def as_plan(schedule: str | Path | Plan) -> Plan:
    """A plan as it is; else the schedule of that name or file, its trees and cut by default; raises ScheduleError."""
    return schedule if isinstance(schedule, Plan) else make_plan(str(schedule), Drafting(), DEFAULT_CUT)


def calls_medium(plan: Plan) -> bool:
    """Whether a plan may ever call the medium drafter."""
    schedule = plan.schedule.schedule if isinstance(plan.schedule, Artifact) else plan.schedule
    return plan.drafting.depth > 0 and plan.drafting.medium_calls != 0 and schedule != Mask(0)


def check_medium(plan: Plan, given: bool) -> None:
    """Raise ScheduleError where a plan calls a medium drafter and none is `given`."""
    if calls_medium(plan) and not given:
        raise ScheduleError(f"schedule {plan.name!r} calls a medium drafter; give one (medium=..., --medium)")


def check_models(plan: Plan, target: Model, medium: Model | None) -> None:
    """Raise ScheduleError where a plan's artifact was learned with other models than these."""
    if isinstance(plan.schedule, Artifact):
        for role, model in (("target", target), ("medium", medium)):
            if model is not None and plan.schedule.models.get(role) != model.fingerprint:
                raise ScheduleError(
                    f"{plan.name} was learned with another {role} than {model.name}: the text is exact all the same, "
                    "the gain may not hold; distill one for these models, or accept it (--force; in Python, as a Plan)"
                )


def make_plan(name: str, drafting: Drafting, cut: Cut | None) -> Plan:
    """The plan called `name`: small, medium, a mask, autoregressive, or an artifact file with its own trees and cut.

    Raises ScheduleError for a name that is none of these.
    """
    if name == AUTOREGRESSIVE.name:
        return AUTOREGRESSIVE
    if (mask := parse_mask(name, drafting.depth)) is not None:
        assert cut is not None
        return Plan(name, mask, drafting, cut)
    path = Path(name)
    if not path.exists():
        raise ScheduleError(
            f"schedule {name!r}: neither small, medium, autoregressive, a mask such as 0b00101, nor an artifact file"
        )
    return plan_from_artifact(load_artifact(path), name)


def plan_from_artifact(artifact: Artifact, name: str) -> Plan:
    """The plan that an artifact describes; raises ScheduleError where its settings make no sense."""
    try:
        return Plan(name, artifact, Drafting(**artifact.drafting), _cut_from(artifact.cut))
    except (TypeError, KeyError, ValueError) as error:
        raise ScheduleError(f"{name}: its drafting or cut is damaged ({error}); distill again") from error


def make_cut(text: str, profile: LatencyProfile | None, rho: float | None) -> Cut:
    """`worth` (needs a profile; rho by default 1 / T_tgt(1)), `none`, or a number: the least log s."""
    if text == "none":
        return Cut("none")
    if text == "worth":
        if profile is None:
            raise ScheduleError("--cut worth needs --latency, a profile from `treegraft profile`")
        if rho is not None and not 0 < rho < math.inf:
            raise ScheduleError(f"--rho {rho}: give tokens per ms, above 0")
        return Cut("worth", rho=rho if rho is not None else 1 / float(profile.target(1, 0)), profile=profile)
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not -math.inf < limit <= 0:  # NaN fails too
        raise ScheduleError(f"--cut {text!r}: give worth, none, or a limit on log s (at most 0) such as -2.5")
    return Cut("score", log_s=limit)


def _cut_from(data: dict[str, Any]) -> Cut:
    if data["kind"] == "worth":
        if not 0 < float(data["rho"]) < math.inf:
            raise ValueError(f"rho {data['rho']}")
        return Cut("worth", rho=float(data["rho"]), profile=LatencyProfile.from_dict(data["profile"], "artifact"))
    if data["kind"] == "score":
        return Cut("score", log_s=float(data["log_s"]))
    if data["kind"] == "none":
        return Cut("none")
    raise KeyError(f"cut kind {data['kind']!r}")
