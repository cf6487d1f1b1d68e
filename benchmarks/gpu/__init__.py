"""What one NVIDIA GPU reaches, beside what it could: `gpu.sh` runs `python -m benchmarks.gpu`."""
