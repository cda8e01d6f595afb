"""Trains from the last checkpoint until the data ends, or until it is killed: the child processes of test_kill.py.

    python training_child.py        takes requests: one JSON object a line; a child for each

The children are forked from a process that has imported everything, since the imports would be most of the test's time. Each
leads a process group of its own, so that worker processes that a killed one leaves behind can be found.
"""

import json
import os
import sys
import time
from pathlib import Path

WITH_JAX = "jax" in sys.argv[1:]
if not WITH_JAX:  # Grain does without; its worker processes start in a third of the time
    sys.modules["jax"] = sys.modules["orbax"] = None

import grain  # noqa: E402
import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

import shapebucket as sb  # noqa: E402

SAMPLES, EPOCHS, SAVE_EVERY = 700, 2, 3
READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
STEP_SECONDS = WRITE_SECONDS = 0.004  # of a step and of writing a checkpoint, so that kills fall into both


class Samples(grain.MapDataset):
    """Samples of random lengths that start with their number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        number = index % SAMPLES
        length = int(np.random.default_rng(number).integers(1, 41))
        return {"tokens": np.full(length, number, np.int32)}


def make_loader(kind: str, workers: int) -> tuple[grain.IterDataset, sb.BucketPlan]:
    """Makes a loader of two epochs."""
    samples = Samples()
    lengths = sb.measure(samples, sb.Layout({"tokens": "s"}), progress=False)
    plan = sb.plan_buckets(lengths, max_buckets=3, token_budget=250)
    processes = grain.MultiprocessingOptions(num_workers=workers)
    batches = sb.BucketedMapDataset(samples, plan, lengths, seed=3).repeat(EPOCHS)
    parent = samples.shuffle(seed=3).repeat(EPOCHS)
    loader = {
        "schedule": lambda: batches.to_iter_dataset(READ).mp_prefetch(processes),
        "elastic schedule": lambda: sb.ElasticIterDataset(batches, READ, processes),
        "stream": lambda: sb.BucketedIterDataset(parent.to_iter_dataset(READ), plan, max_wait=60).mp_prefetch(
            processes
        ),
        "stream behind": lambda: sb.BucketedIterDataset(
            sb.ElasticIterDataset(parent, READ, processes), plan, max_wait=60
        ),
    }[kind]()
    return loader, plan


class Arrays:
    """A model and a step of NumPy, in one file that is replaced as a whole."""

    def __init__(self, directory: Path, plan: sb.BucketPlan) -> None:
        self.file = directory / "checkpoint.npz"
        self.model = np.zeros(10_000)
        self.step = 0

    def restore(self, iterator: grain.DatasetIterator) -> None:
        if self.file.exists():
            with np.load(self.file) as saved:
                self.model, self.step = saved["model"], int(saved["step"])
                iterator.set_state(json.loads(str(saved["loader"])))

    def train(self, batch: dict) -> None:
        self.model = self.model * 0.9 + (batch["tokens"] * batch["s_mask"]).sum()
        self.step += 1
        time.sleep(STEP_SECONDS)

    def save(self, iterator: grain.DatasetIterator) -> None:
        part = self.file.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, model=self.model, step=self.step, loader=json.dumps(iterator.get_state()))
            time.sleep(WRITE_SECONDS)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.file)


class Compiled:
    """A model of JAX, a compiled step, and checkpoints with Orbax."""

    def __init__(self, directory: Path, plan: sb.BucketPlan) -> None:
        import jax.numpy as jnp
        import orbax.checkpoint as ocp

        def train_step(model, batch):
            seen = jnp.where(batch["s_mask"], batch["tokens"], 0).sum()
            return {"w": model["w"] * 0.9 + seen, "step": model["step"] + 1}

        self.ocp = ocp
        self.state = {"w": jnp.zeros(1_000), "step": jnp.zeros((), jnp.int32)}
        self.compiled = sb.CompiledStep(train_step, plan, donate_argnames="model")
        self.compiled.compile(self.state, sb.BATCH)
        self.manager = ocp.CheckpointManager(
            directory / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

    @property
    def model(self) -> np.ndarray:
        return np.asarray(self.state["w"])

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def restore(self, iterator: grain.DatasetIterator) -> None:
        step = self.manager.latest_step()
        if step is not None:
            args = self.ocp.args.Composite(
                model=self.ocp.args.StandardRestore(self.state), loader=grain.checkpoint.CheckpointRestore(iterator)
            )
            self.state = self.manager.restore(step, args=args).model

    def train(self, batch: dict) -> None:
        self.state = self.compiled(self.state, batch)
        time.sleep(STEP_SECONDS)

    def save(self, iterator: grain.DatasetIterator) -> None:
        args = self.ocp.args.Composite(
            model=self.ocp.args.StandardSave(self.state), loader=grain.checkpoint.CheckpointSave(iterator)
        )
        self.manager.save(self.step, args=args)
        self.manager.wait_until_finished()


def train(directory: Path, kind: str, workers: int) -> None:
    """Trains; the log says what was begun and what was done, each in one write."""
    log = os.open(directory / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(*what) -> None:
        os.write(log, json.dumps(what).encode() + b"\n")

    loader, plan = make_loader(kind, workers)
    trainer = (Compiled if WITH_JAX else Arrays)(directory, plan)
    iterator = iter(loader)
    trainer.restore(iterator)
    while True:
        note("step", trainer.step)
        try:
            batch = next(iterator)
        except StopIteration:
            break
        trainer.train(batch)
        note("done", trainer.step, batch["tokens"][batch["example_mask"], 0].tolist())
        if trainer.step % SAVE_EVERY == 0:
            note("save", trainer.step)
            trainer.save(iterator)
            note("saved", trainer.step)
    note("end", trainer.step, trainer.model.sum().hex() if not WITH_JAX else float(trainer.model.sum()).hex())
    iterator.close()


def serve() -> None:
    for request in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                os.setsid()
                options = json.loads(request)
                train(Path(options["directory"]), options["kind"], options["workers"])
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    if WITH_JAX:
        import jax  # noqa: F401
        import orbax.checkpoint  # noqa: F401
    serve()
