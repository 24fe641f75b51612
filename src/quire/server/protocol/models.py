"""/v1/models."""

from typing_extensions import TypedDict


class Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: str
    data: list[Model]
