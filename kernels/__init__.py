"""Operations on tensors: one plain-torch reference each, and the backends that `ops` chooses."""
