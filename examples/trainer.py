"""The trainer's side, whole: create a run, and publish what each optimiser step changed."""

import sys

import torch

from patchstore import Publisher

model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

with Publisher(sys.argv[1], model) as publisher:  # a folder, or s3://bucket/prefix
    publisher.publish_patch(0)
    for step in range(1, 9):
        loss = model(torch.randn(64, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        publisher.publish_patch(step)  # returns after comparing; encoding and upload go on behind
