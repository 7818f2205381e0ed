"""What every training run shares: its flags, its folders, its clock, measuring, saving and resuming, Ctrl-C.

A run is a folder for checkpoints and one of the same name for TensorBoard: `python grpo.py --kl 0.05` writes
checkpoints/grpo/kl-0.05 and runs/grpo/kl-0.05.
"""

import contextlib
import hashlib
import math
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

import evaluate
import model as models
from cli import Parser, Problem, minutes, name, positive, progress, reason, say, whole
from data import DEMO, load_instructions
from sample import write

RUNS = Path(__file__).resolve().parent / "runs"
MEASURE_ASKS = 50
SAVE_AFTER = 3  # minutes
COMPILE_FROM = 5  # minutes: a shorter run does not earn back the half minute that compiling takes


def flags(description, start, unit="rollouts", budget=10.0):
    """The parser with the flags that mean the same in every training script."""
    parser = Parser(description)
    parser.add_argument("--minutes", type=minutes, default=budget, help=f"train for so long, and measure once more (default {budget:g})")
    parser.add_argument(f"--{unit}", dest="steps", metavar="N", type=positive, help=f"stop after so many {unit}, in place of minutes")
    parser.add_argument("--seed", type=whole, default=1, help="of all that is random (default 1)")
    if start:
        shown = Path(start).relative_to(models.CHECKPOINTS.parent)
        parser.add_argument("--from", dest="start", metavar="CHECKPOINT", default=start, help=f"the model to start from (default {shown})")
        parser.set_defaults(usual_start=start)
    parser.add_argument("--name", type=name, help="added to the run's folder, to keep it apart from others")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the first of these that is there)")
    parser.add_argument("--resume", action="store_true", help="go on with the run of this name; its earlier minutes and steps count")
    parser.add_argument("--overwrite", action="store_true", help="start this run afresh; the model stays until there is a new one")
    return parser


def file_hash(path):
    """What tells one checkpoint file from another."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise Problem(f"cannot read {path}: {reason(error)}") from None


def relative(path):
    """A path as seen from the course's folder, which may be moved; as it is where another drive holds it."""
    try:
        return os.path.relpath(path, RUNS.parent)
    except ValueError:
        return str(Path(path).resolve())


def clip_gradients(model):
    """Scale a model's gradients down to a norm of 1, if it is above. Returns the norm before; raises `Problem` where it is
    not finite, before any weight moves."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    if not math.isfinite(norm):
        raise Problem("the gradient is not finite, and was not followed: try a lower learning rate")
    return norm


def compile_blocks(*these, dynamic=False):
    """Have PyTorch write the blocks of models anew, all between two matrix products in one piece, if a compiler is here.

    dynamic: for batches of any shape, a little slower than for one.
    """
    try:
        torch.compile(torch.neg)(torch.ones(2, device=these[0].cos.device))
    except Exception as error:  # of a compiler that is missing or broken, in one of many ways
        say(f"goes on without torch.compile, which does not work here ({str(error).strip().splitlines()[0][:80]})")
        return
    for model in these:
        for block in model.blocks:
            block.compile(dynamic=dynamic)


class Run:
    """One training run. Makes its folders, or refuses to where they hold a run already.

    run = Run(args, "grpo/kl-0.05")
    for number in run.loop(...):
        ...
    """

    def __init__(self, args, kind):
        label = "-".join([kind, *[args.name] * bool(args.name), *[f"seed-{args.seed}"] * (args.seed != 1)])
        self.kind, self.label, self.args = kind, label, args
        self.folder = models.CHECKPOINTS / label
        self.state_file = self.folder / "state.pt"
        self.device, dtype = models.pick_device(args.device)
        self.precision = models.Precision(self.device, dtype)
        self.compiles = not args.steps and args.minutes >= COMPILE_FROM
        self.steps, self.earlier, self.stopped, self.start_hash, self.ended = 0, 0.0, False, "", None
        if args.resume and args.overwrite:
            raise Problem("--resume and --overwrite exclude each other")
        if args.resume and not self.state_file.exists():
            raise Problem(f"nothing to resume: there is no {self.state_file}")
        if args.resume:
            self._read_state(args)
        if getattr(args, "start", None):
            self.asks, self.plain = load_instructions(), evaluate.load_plain()  # to measure on: before anything is thrown away
            # trained in place: a script that needs it as it was copies it first
            self.base, self.start_hash = models.load_checkpoint(args.start, self.device), file_hash(args.start)
            if args.overwrite and Path(args.start).resolve().is_relative_to(self.folder.resolve()):
                raise Problem(f"--overwrite would throw {args.start} away, which --from names: use --name")
        if args.overwrite:
            shutil.rmtree(RUNS / label, ignore_errors=True)
            for file in set(self.folder.glob("*.pt")) - {self.folder / "model.pt"}:  # that one stays until there is a new one
                file.unlink(missing_ok=True)
        elif not args.resume and (any(self.folder.glob("*.pt")) or (RUNS / label).exists()):
            resume = "--resume goes on with it, " * self.state_file.exists()
            raise Problem(f"there is a run {label} already: {resume}--overwrite replaces it, --name keeps both")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # step 0 is nothing but an evaluation, which a run that never got further makes again
            self.writer = SummaryWriter(RUNS / label, purge_step=self.steps + (self.steps > 0) if args.resume else None)
        except OSError as error:
            raise Problem(f"cannot write to {error.filename or self.folder}: {reason(error)}") from None
        models.keep_freed_memory()
        torch.manual_seed(args.seed)
        self.random = np.random.default_rng(args.seed)
        for signum in signal.SIGINT, signal.SIGTERM:
            signal.signal(signum, self._stop)
        say(f"{label} on {self.device} in {str(dtype).removeprefix('torch.')}: Ctrl-C stops it as the end of its time does")
        self.started = time.monotonic()
        self.saved = self.minutes
        if args.resume and self.over():
            say(f"it is complete, after {self.earlier:.1f} minutes and {self.steps} steps, which count: ask for more to go on")

    def _read_state(self, args):
        """Counters, and the model that the run started from, which must still be the same file."""
        self.state = models.read(self.state_file)
        try:
            clock = self.state["run"]
            self.steps, self.earlier, start, known = clock["steps"], clock["minutes"], clock["start"], clock["start_hash"]
            kind, seed = clock["kind"], clock.get("seed", args.seed)
        except (LookupError, TypeError):
            raise Problem(f"{self.state_file} is not the state of a run: --overwrite starts afresh") from None
        if kind != self.kind:
            raise Problem(f"{self.state_file} is of a run {kind}, not {self.kind}: give the flags that it was started with")
        if seed != args.seed:  # --name seed-2 and --seed 2 are one folder
            raise Problem(f"{self.state_file} is of a run with --seed {seed}, not {args.seed}: give the flags that it was started with")
        if start:
            start = (RUNS.parent / start).resolve()
            if Path(args.start).resolve() not in (start, Path(args.usual_start).resolve()):
                raise Problem(f"this run started from {start}: leave --from out")
            args.start = start
            if file_hash(args.start) != known:
                raise Problem(f"{args.start} is no longer the model that this run started from: --overwrite starts afresh")

    def _stop(self, *_):
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        say("stopping after this step; once more to stop at once")

    @property
    def minutes(self):
        """Minutes that this run has taken, earlier parts of a resumed one included, its last evaluation not."""
        return self.earlier + (time.monotonic() - self.started) / 60 if self.ended is None else self.ended

    def share(self):
        """How much of the run is done, from 0 to 1: steps where they are counted, else time."""
        done = self.steps / self.args.steps if self.args.steps else self.minutes / self.args.minutes
        return min(1.0, done)

    def over(self):
        """Stopped, or at its end; a run whose first evaluation takes all its time still makes one step."""
        over = self.stopped or (self.steps > 0 and self.share() >= 1)
        if over:
            self.ended = self.minutes
        return over

    def due(self):
        """Has the state not been saved for so long that it should be?"""
        return self.minutes - self.saved > SAVE_AFTER

    def log(self, values):
        """Scalars and texts to TensorBoard, under the count of steps done."""
        with self._logging():
            for key, value in values.items():
                if isinstance(value, str):
                    self.writer.add_text(key, "\n".join("    " + line for line in value.splitlines()), self.steps)  # as it stands
                else:
                    self.writer.add_scalar(key, value, self.steps)

    @contextlib.contextmanager
    def _logging(self):
        try:
            yield
        except OSError as error:  # of the writer's thread, some steps ago
            raise Problem(f"cannot write below {RUNS}: {reason(error)}") from None

    def save_state(self, **parts):
        """Write all that a resumed run needs: weights, optimizers, random states, counters."""
        states = {key: part.state_dict() if hasattr(part, "state_dict") else part for key, part in parts.items()}
        start = getattr(self.args, "start", None)
        clock = {"kind": self.kind, "seed": self.args.seed, "steps": self.steps, "minutes": self.minutes, "start_hash": self.start_hash}
        clock |= {"start": relative(start) if start else ""}
        clock |= {"torch_random": torch.get_rng_state(), "numpy_random": self.random.bit_generator.state}
        models.save({**states, "run": clock}, self.state_file)
        self.saved = self.minutes

    def load_state(self, **parts):
        """The reverse, into parts that have a `load_state_dict`. Returns all that was saved."""
        try:
            torch.set_rng_state(self.state["run"]["torch_random"])
            self.random.bit_generator.state = self.state["run"]["numpy_random"]
            for key, part in parts.items():
                part.load_state_dict(self.state[key])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            said = str(error).strip().partition("\n")[0][:80]
            raise Problem(f"{self.state_file} does not fit this run ({said}): --overwrite starts afresh") from None
        return vars(self).pop("state")

    def report(self, model, parts, unit, reference=None):
        """Measure on held-out asks and plain stories, log and print it with the demo story, keep the model."""
        self.save_state(**parts)  # first, so that a second Ctrl-C does not cost the steps before it
        progress(self.share(), 1, "measuring")
        with torch.compiler.set_stance("force_eager"):  # as evaluate.py does
            figures = evaluate.measure(model, self.precision, self.asks[:MEASURE_ASKS], 2, self.plain, reference)
        story = write(models.for_writing(model, self.precision.dtype), DEMO, 120, generator=torch.Generator().manual_seed(1))
        names = {"eval/words_used": "words_used", "eval/ended": "ended", "eval/plain_loss": "plain_bits_per_byte", "eval/kl": "kl"}
        self.log({name: figures[key] for name, key in names.items() if figures[key] is not None} | {"demo/story": story})
        kl = "" if figures["kl"] is None else f", KL {figures['kl']:.2f}"
        say(
            f"held-out asks after {self.steps} {unit}s: words used {figures['words_used']:.1%}, ended {figures['ended']:.0%}, "
            f"plain stories {figures['plain_bits_per_byte']:.4f} bits per byte{kl}\n  {' '.join(story.split())}"
        )
        if self.steps:
            models.save_checkpoint(self.folder / f"{unit}-{self.steps}.pt", model, steps=self.steps)

    def loop(self, model, parts, unit, every, reference=None):
        """The numbers of the steps to take, until the run is over.

        Around them is all that is not learning: `report` before the first, every so many and after the last, none twice;
        the state saved where it is due; `finish`.
        """

        reported = lambda: (self.folder / f"{unit}-{self.steps}.pt").exists()
        report = lambda: self.report(model, parts, unit, reference)
        if self.steps % every == 0 and not self.stopped and not reported():  # a resumed run makes up for one that was broken off
            report()
        while not self.over():
            progress(self.share(), 1, f"{unit} {self.steps + 1}")
            self.steps += 1
            yield self.steps
            if self.steps % every == 0 and not self.over():
                report()
            elif self.due():
                self.save_state(**parts)
        if self.steps and not reported():
            report()
        else:
            self.save_state(**parts)  # the clock went on since the last time
        self.finish(model, unit)

    def finish(self, model, unit):
        """Write the final model, close the run, and say where it is. Raises `Problem` where there was no step to make one."""
        file = self.folder / "model.pt"
        if self.steps:
            models.save_checkpoint(file, model, steps=self.steps, minutes=self.minutes, start=self.start_hash)
            say(f"wrote {file} after {self.minutes:.1f} minutes and {self.steps} {unit}s; tensorboard --logdir runs")
        with self._logging():
            self.writer.close()
        if not self.steps:
            raise Problem(f"stopped before the first {unit}: no model was written" + "; the old one is still there" * file.exists())
