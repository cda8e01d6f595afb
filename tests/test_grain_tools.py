"""Grain's own tools over the loaders: element spec, execution summary, graph, checkpoint check.

The private names that shapebucket/loading/_grain_private.py leans on are read here through Grain: these tests fail when they move.
"""

import logging
import time

import grain
import numpy as np
import pytest
from absl import flags
from conftest import assert_resumes_everywhere
from grain._src.python.dataset.dataset import get_execution_summary  # no public name as yet

import shapebucket as sb

READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
Spec = grain.experimental.ShapeDtypeStruct


@pytest.fixture
def stream(source, token_plan):
    return sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan, max_wait=40)


@pytest.fixture(params=["batches", "stream", "elastic"])
def loader(request, scheduled, stream):
    """Each loader as an IterDataset of batches."""
    loaders = {
        "batches": scheduled.to_iter_dataset(READ),
        "stream": stream,
        "elastic": sb.ElasticIterDataset(scheduled, READ),
    }
    return loaders[request.param]


class FirstTokens(grain.transforms.Map):
    """A map that says what it gives."""

    def map(self, element):
        return element["tokens"][:, 0]

    def output_spec(self, input_spec):
        return Spec(input_spec["tokens"].shape[:1], input_spec["tokens"].dtype)


class TestElementSpec:
    def test_a_dimension_that_buckets_do_not_share_is_unknown(self, loader, token_plan):
        assert len(token_plan) > 1
        assert len(set(token_plan.batch_sizes)) > 1
        assert grain.experimental.get_element_spec(loader) == {
            "tokens": Spec((None, None), np.dtype(np.int32)),
            "s_mask": Spec((None, None), np.dtype(bool)),
            "example_mask": Spec((None,), np.dtype(bool)),
        }

    def test_dimensions_that_all_buckets_share_are_known(self):
        layout = sb.Layout({"image": {"pixels": "h 3"}, "label": ""})
        samples = [{"image": {"pixels": np.zeros((n, 3), np.float32)}, "label": np.int32(n)} for n in range(1, 30)]
        lengths = sb.measure(samples, layout, progress=False)
        plan = sb.plan_buckets(lengths, max_buckets=3, batch_size=4, masks="length")
        stream = sb.BucketedIterDataset(grain.MapDataset.source(samples).to_iter_dataset(READ), plan)
        assert grain.experimental.get_element_spec(stream) == {
            "image": {"pixels": Spec((4, None, 3), np.dtype(np.float32))},
            "label": Spec((4,), np.dtype(np.int32)),
            "h_length": Spec((4,), np.dtype(np.int32)),
            "example_mask": Spec((4,), np.dtype(bool)),
        }
        one = sb.plan_buckets(lengths, max_buckets=1, batch_size=4)
        stream = sb.BucketedIterDataset(grain.MapDataset.source(samples).to_iter_dataset(READ), one)
        assert grain.experimental.get_element_spec(stream)["h_mask"] == Spec((4, 29), np.dtype(bool))

    def test_every_batch_fits_it(self, loader):
        spec = grain.experimental.get_element_spec(loader)
        for batch in loader:
            assert batch.keys() == spec.keys()
            for name, array in batch.items():
                assert array.dtype == spec[name].dtype
                assert len(array.shape) == len(spec[name].shape)
                assert all(known in (None, size) for size, known in zip(array.shape, spec[name].shape, strict=True))

    def test_it_goes_through_other_stages(self, scheduled, stream):
        flags.FLAGS.mark_as_parsed()
        spec = grain.experimental.get_element_spec(scheduled)
        for stage in (
            scheduled.repeat(),
            scheduled[2:].shuffle(seed=0),
            grain.MapDataset.mix([scheduled, scheduled]),
            scheduled.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=2)),
            stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)),
            grain.experimental.RepeatIterDataset(stream),
            grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=1),
        ):
            assert grain.experimental.get_element_spec(stage) == spec
        assert grain.experimental.get_element_spec(stream.map(FirstTokens())) == Spec((None,), np.dtype(np.int32))


class TestExecutionSummary:
    def test_a_loader_counts_its_batches_and_its_own_time(self, loader):
        tracking = grain.experimental.DatasetOptions(
            execution_tracking_mode=grain.experimental.ExecutionTrackingMode.STAGE_TIMING
        )
        iterator = iter(grain.experimental.WithOptionsIterDataset(loader, tracking))
        count = len(list(iterator))
        iterator._stats.report()  # otherwise it does so every 5 seconds
        nodes = {node.name.split("(")[0]: node for node in get_execution_summary(iterator).nodes.values()}
        assert nodes["SourceMapDataset"].num_produced_elements > 50  # those before a stage's first element may be lost
        made = [nodes[name] for name in nodes if name.startswith(("Bucketed", "Elastic"))]
        assert made
        for node in made:
            assert node.num_produced_elements == count
            assert 0 < node.min_processing_time_ns <= node.max_processing_time_ns < 1_000_000_000

    def test_the_time_of_a_parent_is_left_out(self, tokens, token_plan, token_lengths):
        """Every read takes 2 ms, so 100 take 200 ms; the loaders' own time stays far below."""

        def slow(sample):
            time.sleep(0.002)
            return sample

        source = grain.MapDataset.source(tokens).map(slow)
        unbuffered = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        tracking = grain.experimental.DatasetOptions(
            execution_tracking_mode=grain.experimental.ExecutionTrackingMode.STAGE_TIMING
        )
        for loader in (
            sb.BucketedMapDataset(source, token_plan, token_lengths).to_iter_dataset(unbuffered),
            sb.BucketedIterDataset(source.to_iter_dataset(unbuffered), token_plan),
        ):
            iterator = iter(grain.experimental.WithOptionsIterDataset(loader, tracking))
            list(iterator)
            iterator._stats.report()
            (node,) = [n for n in get_execution_summary(iterator).nodes.values() if n.name.startswith("Bucketed")]
            assert 0 < node.total_processing_time_ns < 100_000_000


def test_the_graph_shows_each_loader_and_its_batches(loader, caplog):
    flags.FLAGS.mark_as_parsed()
    grain.config.update("py_dataset_visualization_output_dir", "")
    try:
        with caplog.at_level(logging.INFO, logger="absl"):
            next(iter(loader))
    finally:
        grain.config.update("py_dataset_visualization_output_dir", None)
    graph = caplog.records[-1].getMessage()
    assert graph.startswith("Grain Dataset graph:")
    edges = [line.strip("│ ") for line in graph.splitlines() if "│" in line]
    assert any(edge.startswith("Bucketed") for edge in edges)
    assert "'example_mask': 'bool[" in graph
    assert "\nNone" not in graph


STAGES = {
    "alone": lambda loader: loader,
    "repeat": lambda loader: grain.experimental.RepeatIterDataset(loader, num_epochs=2),
    "map": lambda loader: loader.map(lambda batch: batch["tokens"] + 1),
    "thread": lambda loader: grain.experimental.ThreadPrefetchIterDataset(loader, prefetch_buffer_size=2),
    "mix": lambda loader: grain.IterDataset.mix([loader, loader.map(lambda batch: batch)], [0.7, 0.3]),
    "all": lambda loader: grain.experimental.ThreadPrefetchIterDataset(
        grain.experimental.RepeatIterDataset(grain.IterDataset.mix([loader, loader]), num_epochs=2).map(
            lambda batch: batch["tokens"]
        ),
        prefetch_buffer_size=2,
    ),
}


class TestCheckpoints:
    """From every position of a short epoch, into a fresh iterator."""

    @pytest.mark.parametrize("stage", STAGES)
    def test_grains_own_check_passes(self, loader, stage):
        grain.experimental.assert_equal_output_after_checkpoint(STAGES[stage](loader))

    @pytest.mark.parametrize("stage", STAGES)
    def test_states_go_through_json(self, loader, stage):
        assert_resumes_everywhere(STAGES[stage](loader))

    def test_mixed_before_they_are_read(self, scheduled):
        mixed = grain.MapDataset.mix([scheduled, scheduled.map(lambda batch: batch)], [0.7, 0.3]).repeat(2)
        grain.experimental.assert_equal_output_after_checkpoint(mixed.to_iter_dataset(READ))
        assert_resumes_everywhere(mixed.to_iter_dataset(READ))
