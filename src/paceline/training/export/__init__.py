"""The whole model of a checkpoint as a program, for torch.export or ONNX; adapters alone, for peft."""
