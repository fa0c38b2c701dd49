"""Other file formats of a candidate: ONNX, and a dense checkpoint."""
