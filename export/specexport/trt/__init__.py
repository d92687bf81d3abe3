"""TensorRT engines from ONNX files in the dialect of :mod:`specgraphs.static_rules`."""
