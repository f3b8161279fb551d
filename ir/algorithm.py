"""The learning algorithm, by what it asks of a step: which models, which passes, which sequences."""

from __future__ import annotations

from typing import Literal

import msgspec

from ir.quantities import NonNegative, PositiveFloat

Name = Literal[
    "ppo",
    "grpo",
    "dr-grpo",
    "dapo",
    "rloo",
    "reinforce++",
    "reinforce++-baseline",
    "remax",
    "gspo",
    "cispo",
    "distillation",
]

GROUPED = ("grpo", "dr-grpo", "dapo", "rloo", "reinforce++-baseline", "gspo", "cispo")
KL_IN_REWARD = ("ppo", "rloo", "reinforce++", "reinforce++-baseline", "remax")


class Algorithm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy-gradient method and its constants. The traits below are what a step's graph depends on."""

    name: Name
    learning_rate: PositiveFloat
    clip: PositiveFloat = 0.2
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL divergence to the reference; 0 leaves the reference pass out."""
    max_importance_weight: PositiveFloat = 5.0
    """Cap on the weight pi_old / pi_rollout of a token that older weights generated."""
    max_gradient_norm: PositiveFloat = 1.0

    @property
    def uses_critic(self) -> bool:
        """Whether a learnt value of every token is the baseline: PPO ("Proximal Policy Optimization Algorithms",
        arXiv 1707.06347; on language models "Training language models to follow instructions with human feedback",
        arXiv 2203.02155)."""
        return self.name == "ppo"

    @property
    def uses_groups(self) -> bool:
        """Whether the other samples of a prompt are the baseline, so that there must be some:

        - GRPO: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv 2402.03300;
        - Dr. GRPO: "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783;
        - DAPO: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476;
        - RLOO: "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
          arXiv 2402.14740;
        - REINFORCE++ with baseline: "REINFORCE++", arXiv 2501.03262;
        - GSPO: "Group Sequence Policy Optimization", arXiv 2507.18071;
        - CISPO: "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", arXiv 2506.13585.
        """
        return self.name in GROUPED

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is taken off the reward of each token, so that advantages wait for the reference's
        log-probs: PPO (arXiv 2203.02155), RLOO (arXiv 2402.14740), REINFORCE++ in both forms (arXiv 2501.03262), ReMax
        (arXiv 2310.10505). Else it is a term of the loss, which only the update waits for (GRPO, arXiv 2402.03300)."""
        return self.name in KL_IN_REWARD

    @property
    def dynamic_sampling(self) -> bool:
        """Whether groups of equal rewards are dropped and replaced: DAPO ("DAPO: An Open-Source LLM Reinforcement
        Learning System at Scale", arXiv 2503.14476)."""
        return self.name == "dapo"

    @property
    def greedy_baseline(self) -> bool:
        """Whether the reward of one greedy response a prompt is the baseline: ReMax ("ReMax: A Simple, Effective, and
        Efficient Reinforcement Learning Method for Aligning Large Language Models", arXiv 2310.10505)."""
        return self.name == "remax"

    @property
    def uses_teacher(self) -> bool:
        """Whether a teacher's log-probs of the actor's own samples are the signal ("On-Policy Distillation of Language
        Models: Learning from Self-Generated Mistakes", arXiv 2306.13649)."""
        return self.name == "distillation"

    @property
    def uses_reward(self) -> bool:
        """Whether responses are scored, by a verifier or a reward model: all but distillation (arXiv 2306.13649)."""
        return not self.uses_teacher
