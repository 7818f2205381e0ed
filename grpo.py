"""GRPO: reinforcement learning with a group in place of the critic. Shao et al. 2024, https://arxiv.org/abs/2402.03300.

    python grpo.py --minutes 10 --kl 0.05       checkpoints/grpo/kl-0.05/model.pt, runs/grpo/kl-0.05

Eight stories for each of 16 instructions: a story is judged against the others of its group. All the rest,
the rollout, the ratio, the clip, the KL, the loop, is `ppo.py`'s. Against DeepSeekMath (7B parameters, 64 answers a
question, a reward model, one update a rollout) this is small, and the reward is a rule.
"""

from cli import main_guard
from ppo import STORIES, arguments, different_asks, enough_asks, train
from run import Run

PROMPTS = 16  # instructions a rollout
GROUP = 8  # stories an instruction
assert PROMPTS * GROUP == STORIES  # so that both methods write as many


def group_advantages(rewards, group=GROUP):
    """How much better each story is than its group: Shao et al. 2024, section 4.1.2.

    rewards: (stories,), the stories of a group side by side. Returns advantages (stories,), the reward less the group's
    mean, over its standard deviation (n - 1) plus 1e-4, and tied (groups,), true where all rewards of a group are equal;
    there the advantages are exactly zero.

        group_advantages(tensor([0., 1., 1., 1.]), group=4)   ->   [-1.4997, 0.4999, 0.4999, 0.4999], [False]
    """
    groups = rewards.view(-1, group)  # (groups, group)
    tied = (groups == groups[:, :1]).all(1)  # by comparing: a spread that is rounding alone is no spread
    centred = groups - groups.mean(1, keepdim=True)
    advantages = centred / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.masked_fill(tied[:, None], 0.0).flatten(), tied


class GRPO:
    """What GRPO does its own way, method by method against `ppo.PPO`."""

    def ask(self, random):
        """16 different instructions, eight stories each; a group's rows stand together."""
        return [words for words in different_asks(random, PROMPTS) for _ in range(GROUP)]

    def advantages(self, batch):
        """The story's advantage for each of its tokens: (stories, longest - 1), and what to log."""
        advantages, tied = group_advantages(batch.rewards)
        return advantages[:, None] * batch.mask, {"rollout/tied_groups": int(tied.sum())}

    def weights(self, mask):
        """A mean over each story's tokens, then over the stories."""
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)

    def learn(self, batch, rows):
        """No critic, nothing to learn."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Nothing to restore."""


def main():
    args = arguments(__doc__).parse_args()
    enough_asks(PROMPTS)
    run = Run(args, f"grpo/kl-{args.kl:g}")
    train(run, GRPO(), args.kl)


if __name__ == "__main__":
    main_guard(main)
