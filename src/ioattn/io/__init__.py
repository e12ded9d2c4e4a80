"""The laboratory: predict, count and measure the bytes that a schedule of attention moves, and draw them."""
