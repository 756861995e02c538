//! Runs a schedule symbolically: result, freedom from deadlock, bytes sent per rank.
