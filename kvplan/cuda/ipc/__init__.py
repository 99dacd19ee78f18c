"""Memory of a GPU, events and words that several processes of one machine share."""
