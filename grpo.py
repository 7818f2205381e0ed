"""GRPO: reinforcement learning with a group in place of the critic. Shao et al. 2024, https://arxiv.org/abs/2402.03300.

    python grpo.py --minutes 10 --kl 0.05       checkpoints/grpo/kl-0.05/model.pt, runs/grpo/kl-0.05

Eight stories for each of 16 instructions: a story is as good as it is better than the others of its group. All the rest,
the rollout, the ratio, the clip, the KL, the loop, is `ppo.py`'s. Against DeepSeekMath (7B parameters, 64 answers a
question, a reward model, one update a rollout) this is small, and the reward is a rule.
"""

from data import load_asks
from ppo import STORIES

PROMPTS = 16  # instructions a rollout
GROUP = 8  # stories an instruction
assert PROMPTS * GROUP == STORIES  # so that both methods write as many


class GRPO:
    """What GRPO does its own way, method by method against `ppo.PPO`."""

    def ask(self, random):
        """16 different instructions, eight stories each; a group's rows stand together."""
        asks = load_asks()
        return [asks[number] for number in random.choice(len(asks), PROMPTS, replace=False) for _ in range(GROUP)]

    def weights(self, mask):
        """A mean over each story's tokens, then over the stories."""
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)

    def learn(self, batch, rows):
        """No critic, nothing to learn."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Nothing to restore."""
