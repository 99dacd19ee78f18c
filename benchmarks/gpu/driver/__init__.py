"""What a GPU's driver does, without copies of kvplan: batches that lose bytes, waits and streams that cost time."""
