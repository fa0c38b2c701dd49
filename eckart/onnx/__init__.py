"""Export of models to ONNX, in float32 and in int8, and inference with onnxruntime. Needs the extra `onnx`."""

from eckart.onnx.exporting import Exported as Exported
from eckart.onnx.exporting import export as export
from eckart.onnx.exporting import export_files as export_files
from eckart.onnx.exporting import return_embeddings as return_embeddings
from eckart.onnx.running import KEPT as KEPT
from eckart.onnx.running import ExportError as ExportError
from eckart.onnx.running import answer_by as answer_by
from eckart.onnx.running import cache_of as cache_of
from eckart.onnx.running import runner as runner
