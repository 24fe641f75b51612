"""/v1/models."""

from typing import NotRequired

from typing_extensions import TypedDict


class Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    parent: NotRequired[str]  # of an adapter: its base
    max_model_len: NotRequired[int]  # not known of an embedding model that has not been started


class ModelList(TypedDict):
    object: str
    data: list[Model]
