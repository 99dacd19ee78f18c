"""What a GPU's driver does, shown without copies of kvplan: batches that lose bytes, waits and streams that cost speed."""
