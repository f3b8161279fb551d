"""The stage-residual sampler: `Chooser` behind Optuna's interface.

It keeps nothing between asks: each reads all trials of the study, so a study that is
rebuilt from its traces goes on as if it had never stopped.
"""

from __future__ import annotations

import threading
from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from search.choose import Chooser
from search.problem import Candidates
from search.view import PLAN_ATTRIBUTE, distributions, read_study, study_params


class StageResidualSampler(BaseSampler):
    """Proposes whole plans out of a list of legal ones.

    Use `study.ask(distributions(space))`. Threads may share a sampler: an ask holds a lock
    until its plan is written to its trial, so the next ask sees it as running.
    """

    def __init__(self, candidates: Candidates, *, seed: int = 0) -> None:
        self._candidates = candidates
        self._chooser = Chooser(candidates)
        self._seed = seed
        self._lock = threading.Lock()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All axes, always."""
        return distributions(self._candidates.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The plan of one trial.

        Raises:
            ValueError: every plan was tried, or the trial was enqueued with a part of a plan.
        """
        if "fixed_params" in trial.system_attrs:
            raise ValueError("An enqueued trial must have a value for every axis.")
        with self._lock:
            others = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
            runs, running = read_study(self._candidates, others)
            row = self._chooser.next_row(runs, running, (self._seed, trial.number))
            if row is None:
                raise ValueError("Every plan was tried.")
            params = study_params(self._candidates, row)
            study._storage.set_trial_system_attr(trial._trial_id, PLAN_ATTRIBUTE, params)
        return params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Refuses: axes depend on each other, so no value can be chosen alone.

        Raises:
            ValueError: always; Optuna calls this for names and ranges that are not the space's.
        """
        raise ValueError(f"`{param_name}` must be an axis of the space with all its levels.")
