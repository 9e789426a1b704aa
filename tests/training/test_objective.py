import torch
import torch.nn.functional as F  # noqa: N812

from training.batches import Order
from training.module import Batch
from training.objective import Objective, SoftCrossEntropy

VOCAB, HIDDEN = 11, 6


def test_cross_entropy_and_its_gradient_are_those_of_torch() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn((4, 9), generator=random, dtype=torch.float64).requires_grad_()
    p = torch.rand((4, 9), generator=random, dtype=torch.float64)
    p[1] = 0.0  # a row that teaches nothing
    (2.0 * SoftCrossEntropy.apply(logits, p)).backward()
    found, logits.grad = logits.grad, None
    expected = -2.0 * (p * logits.log_softmax(-1)).sum()
    expected.backward()
    assert found is not None
    assert logits.grad is not None
    torch.testing.assert_close(found, logits.grad)
    assert found[1].abs().max() == 0.0


def test_the_loss_is_that_of_the_definition() -> None:
    """Every step over its usable rows: cross-entropy against the target over the draft vocabulary
    where the label is in it, and SmoothL1 on features, weighed by 0.8 ** step."""
    random = torch.Generator().manual_seed(1)
    lm_head = torch.randn((VOCAB, HIDDEN), generator=random)
    drafted = torch.tensor([0, 2, 3, 7, 9])
    targets = torch.randn((2, 4, HIDDEN), generator=random)
    labels = torch.tensor([[0, 1, 2, 3], [9, 7, 0, 0]])  # 1 is not in the draft vocabulary
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    none = torch.zeros(0)
    batch = Batch(none, none, none, none, targets, labels, valid)
    outputs = [torch.randn((2, 4, HIDDEN), generator=random) for _ in range(2)]
    total = 0.0
    agreements: list[float] = []
    for step, output in enumerate(outputs):
        entropy, distance, agreed = [], [], []
        for s, r in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)):
            if r < step:
                continue
            q = (output[s, r] @ lm_head[drafted].T).log_softmax(-1)
            p = (targets[s, r] @ lm_head[drafted].T).softmax(-1)
            distance.append(F.smooth_l1_loss(output[s, r], targets[s, r]))
            known = int(labels[s, r]) in drafted.tolist()
            agreed.append(float(known and int(q.argmax()) == int(p.argmax())))
            if known:
                entropy.append(-(p * q).sum())
        total += 0.8**step * float(torch.stack(entropy).mean() + 0.5 * torch.stack(distance).mean())
        agreements.append(sum(agreed) / len(agreed))
    losses = Objective(lm_head, drafted, 0.5, torch.Generator())(outputs, batch)
    torch.testing.assert_close(float(losses.total), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(list(losses.agreement), agreements)


def test_an_epoch_takes_every_sample_once_and_no_batch_is_too_large() -> None:
    lengths = [1 + (17 * n) % 40 for n in range(101)]
    order = Order(lengths, 120, 5)
    for epoch in range(2):
        batches = order.epoch(epoch)
        assert sorted(index for batch in batches for index in batch) == list(range(101))
        for batch in batches:
            assert len(batch) * max(lengths[index] for index in batch) <= 120
    assert order.epoch(0) == Order(lengths, 120, 5).epoch(0) != order.epoch(1)
