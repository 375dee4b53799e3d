//! Moves bytes between the memory of two nodes: windows, lanes, completions.
