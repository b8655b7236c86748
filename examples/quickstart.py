import os

import torch
import zeropp

rank = int(os.environ.get("RANK", "0"))  # torchrun sets it
torch.manual_seed(0)  # the same model on every rank
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=3))
torch.manual_seed(1 + rank)  # other inputs on every rank
for _ in range(20):
    inputs = torch.randn(16, 256)
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
zeropp.save("out/quickstart", model, optimizer, step=20)
if rank == 0:  # its own loss; the norm is that of all ranks
    print(f"loss {loss:.3f}, gradient norm {norm:.2f}, {zeropp.memory(model)['bytes_per_parameter']}")
