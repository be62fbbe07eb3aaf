"""PyTorch: ``torch.save`` of all ages, TorchScript, exported programs, distributed checkpoints, DeepSpeed."""
