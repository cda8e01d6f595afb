"""Grain stages that batch samples into the shapes of a plan.

`lockstep` stands on its own, since it alone needs JAX.
"""

from shapebucket.loading.elastic import ElasticIterDataset
from shapebucket.loading.iter_dataset import BucketedDatasetIterator, BucketedIterDataset
from shapebucket.loading.map_dataset import BucketedMapDataset

__all__ = [
    "BucketedDatasetIterator",
    "BucketedIterDataset",
    "BucketedMapDataset",
    "ElasticIterDataset",
]
