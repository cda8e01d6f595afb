"""Grain stages that batch samples into the shapes of a plan."""

from shapebucket.loading.elastic import ElasticIterDataset
from shapebucket.loading.iter_dataset import BucketedDatasetIterator, BucketedIterDataset
from shapebucket.loading.lockstep import LockstepDatasetIterator, LockstepIterDataset
from shapebucket.loading.map_dataset import BucketedMapDataset

__all__ = [
    "BucketedDatasetIterator",
    "BucketedIterDataset",
    "BucketedMapDataset",
    "ElasticIterDataset",
    "LockstepDatasetIterator",
    "LockstepIterDataset",
]
