"""CRC-64/NVME bit by bit, as its specification has it: slow, and nobody else's code."""

from __future__ import annotations


def crc64nvme(data: bytes) -> int:
    crc = (1 << 64) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ (1 << 64) - 1
