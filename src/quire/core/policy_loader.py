"""From configuration to a policy.

A class that is not quire's own (`--scheduler-cls`, or a plugin's) is tried out with two requests
before the model is loaded: a mistake is told at the start, and not by the first request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from quire.config.scheduler import POLICIES, SchedulerConfig
from quire.core.policies import CountTokens, Policy, count_all
from quire.core.request import Request, RequestStatus
from quire.errors import ConfigError
from quire.logger import get_logger
from quire.params import SamplingParams

logger = get_logger(__name__)


def make_policy(config: SchedulerConfig, count_uncached: CountTokens = count_all) -> Policy:
    """The policy that the configuration names, empty.

    Raises:
        ConfigError: it cannot be imported, or is no working policy.
    """
    return policy_class(config)(config, count_uncached)


def policy_class(config: SchedulerConfig) -> type[Policy]:
    """The class of the policy that the configuration names.

    Raises:
        ConfigError: as `make_policy`.
    """
    if config.scheduler_cls is not None:
        given_as = f"--scheduler-cls {config.scheduler_cls}"
        found = POLICIES.at(config.scheduler_cls, given_as)
    else:
        given_as = f"--scheduling-policy {config.scheduling_policy}"
        found = POLICIES.get(config.scheduling_policy)
        if found.__module__ == Policy.__module__:
            return found
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"{given_as} does not define {missing}")
    _try_out(given_as, found, config)
    return found


def move_waiting(old: Policy, new: Policy, requests: Iterable[Request]) -> None:
    """Queue what waits in one policy in another.

    Args:
        old: Left as it is.
        new: Empty.
        requests: All requests, in the order they came.
    """
    for request in requests:
        if request.status is RequestStatus.WAITING:
            new.add_request(request)
    for request in reversed([r for r in old if r.status is RequestStatus.PREEMPTED]):
        new.prepend_request(request)


def _try_out(given_as: str, kind: type[Policy], config: SchedulerConfig) -> None:
    """Send two requests through a policy and compare what must hold of any."""
    a, b = (Request(f"trial-{i}", [1, 2], SamplingParams(max_tokens=1)) for i in "ab")
    part = "__init__"
    try:
        policy = kind(config, count_all)
        for part, act, holds in _contract(policy, a, b):
            if not holds(act()):
                raise ConfigError(f"{given_as} {part} breaks the contract of Policy.{part}")
    except ConfigError:
        raise
    except Exception as error:
        logger.debug("%s", given_as, exc_info=True)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{given_as} {part} fails: {what}") from None


def _contract(policy: Policy, a: Request, b: Request) -> list[tuple[str, Any, Any]]:
    """What is done with a policy: method, call, and what must hold of its result."""
    seen: list[Request] = []

    def peek() -> Request:
        seen.append(policy.peek_request(0.0))
        return seen[-1]

    def other() -> Request:
        return b if seen[0] is a else a

    def size_after(act: Callable[[Request], None], request: Request) -> int:
        act(request)
        return len(policy)

    def is_one(request: object) -> bool:
        return request is a or request is b

    return [
        ("add_request", lambda: size_after(policy.add_request, a), lambda size: size == 1),
        ("add_request", lambda: size_after(policy.add_request, b), lambda size: size == 2),
        ("__iter__", lambda: {r.request_id for r in policy}, lambda ids: len(ids) == 2),
        ("peek_request", peek, is_one),
        ("peek_request", peek, lambda r: r is seen[0]),
        ("remove_request", lambda: size_after(policy.remove_request, seen[0]), lambda n: n == 1),
        ("peek_request", peek, lambda r: r is other()),
        ("admit_request", lambda: size_after(policy.admit_request, other()), lambda n: n == 0),
        ("prepend_request", lambda: size_after(policy.prepend_request, other()), lambda n: n == 1),
        ("peek_request", peek, lambda r: r is other()),
        ("remove_request", lambda: size_after(policy.remove_request, other()), lambda n: n == 0),
        ("finish_request", lambda: policy.finish_request(a), lambda result: result is None),
        ("choose_victim", lambda: policy.choose_victim([a, b]), is_one),
        ("may_displace", lambda: policy.may_displace(a, b, 0.0), lambda may: type(may) is bool),
    ]
