//! What a pod gets of a driver, and what is left after everything that can go wrong.
