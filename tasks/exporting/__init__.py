"""Export candidates as ONNX, or as dense checkpoints."""
