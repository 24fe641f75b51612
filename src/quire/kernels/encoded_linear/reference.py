"""The reference has no layout of its own: `quire.quant` decodes tiles of rows and multiplies by them.

An alternative is a module with

    LAYOUT    its name and version: packed rows of another one are not read
    ROWS      rows of a packed block; a packed weight [num_rows / ROWS, …] is cut between blocks only
    serves    (scheme, num_rows, num_columns, dtype of x) -> whether it has a product for such rows
    layout    (scheme, num_rows, num_columns) -> packed tensors as {name: (shape, possible types)}
    PACKING   weights per entry of the first two dimensions of the tensor `packed`
    pack      (scheme, stored tensors, shape) -> packed tensors
    decode    (scheme, packed tensors, shape) -> float32 [num_rows, num_columns]; not needed with GATHERS
    GATHERS   whether a product has gather(ids [T]) -> float32 rows [T, num_columns]; -1: zeros (default: no)
    ORDERS    whether a product puts columns of x into the order of GPTQ's act-order itself (default: no)
    Product   (scheme, packed tensors, shape) -> an object with
              linear(x, out, bias, residual): out = x @ weight.T (+ bias) (+ residual), views with a row stride
              linear_silu_mul(x, bias): rows are gate, then up; None where it is not fused

where a scheme is given by its name (`quire.quant.encoded.Scheme.name`).
"""

import torch

LAYOUT = "reference"
ROWS = 1
PACKING = 1
GATHERS = False
ORDERS = False


def serves(scheme: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> bool:
    return False
