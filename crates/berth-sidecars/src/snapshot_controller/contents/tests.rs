//! What becomes of contents, row by row.

use super::*;

#[test]
fn a_bound_content_is_kept_and_one_without_a_snapshot_is_never_deleted() {
    for (name, sources, bound, deleting, protected, expected) in [
        ("bound", 1, true, false, false, Plan::Protect),
        ("bound and kept", 1, true, false, true, Plan::Nothing),
        ("waiting for its snapshot", 1, false, false, false, Plan::Nothing),
        ("bound and going", 1, true, true, false, Plan::Nothing),
        ("without a source", 0, true, false, false, Plan::Invalid),
        ("with two", 2, false, false, true, Plan::Invalid),
    ] {
        assert_eq!(plan(sources, bound, deleting, protected), expected, "{name}");
    }
}
