//! How a buffer is cut: segments into windows, windows into parts.
