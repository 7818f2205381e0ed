"""What the tests of the updates check against: the loss written out the slow way, and an optimizer that only listens."""

import torch
from conftest import tiny_model

import model as models

FLOAT32 = models.Precision(torch.device("cpu"), torch.float32)


class Recorder:
    """An optimizer that moves nothing and keeps the gradients that it was given."""

    def __init__(self, model):
        self.model, self.gradients = model, []

    def step(self):
        self.gradients.append([weight.grad.clone() for weight in self.model.parameters()])

    def zero_grad(self, set_to_none=True):
        self.model.zero_grad(set_to_none)


def schedule(steps):
    """The share of its peak that a rate has at each of a run's steps: a warm-up of 1%, level up to 40%, down to zero."""
    return [min(1, (step / steps + 1e-3) / 0.01, (1 - step / steps) / 0.6) for step in range(steps)]


def nudged(model, size=0.02):
    """A copy of a model whose weights are a little off, as after some steps of training."""
    other = tiny_model()
    other.load_state_dict(model.state_dict())
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in other.parameters():
            weight += size * torch.randn_like(weight)
    return other


def plain_loss(model, batch, rows, advantages, kl, mean_of_means):
    """The loss of both methods the slow way, by one full forward a story without any padding, and its gradients."""
    stories = []
    for row in rows:
        places = batch.mask[row].nonzero().flatten()  # of the tokens before each story token
        text = batch.tokens[row, : places[-1] + 2]
        scores = model(text[None])[0].log_softmax(-1)
        new = torch.stack([scores[place, text[place + 1]] for place in places])
        ratio, other = new.exp() / batch.log_probs[row, places].exp(), batch.reference[row, places].exp() / new.exp()
        gain = advantages[row, places]
        within = torch.where(gain > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))
        stories.append(kl * (other - other.log() - 1) - within * gain)
    loss = torch.stack([story.mean() for story in stories]).mean() if mean_of_means else torch.cat(stories).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = sum((gradient**2).sum() for gradient in gradients) ** 0.5
    return loss.item(), norm.item(), [gradient / max(1.0, norm.item() + 1e-6) for gradient in gradients]
