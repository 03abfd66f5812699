"""A model that learns by reinforcement, asynchronously, with two vLLM servers and a bucket in between.

`python -m examples.grpo` teaches a small model to sort digits with GRPO (group relative policy optimisation,
Shao et al., 2024, https://arxiv.org/abs/2402.03300). Two real vLLM servers generate the answers. The weights
reach them through a bucket only. One server is killed and restarted in the middle. Nothing is downloaded.
"""
