//! What becomes of contents, row by row.

use super::*;

#[test]
fn a_bound_content_is_kept_and_one_without_a_snapshot_is_never_deleted() {
    for (name, sources, bound, deleting, protected, expected) in [
        ("bound", 1, true, false, false, ContentPlan::Protect),
        ("bound and kept", 1, true, false, true, ContentPlan::Nothing),
        ("waiting for its snapshot", 1, false, false, false, ContentPlan::Nothing),
        ("bound and going", 1, true, true, false, ContentPlan::Nothing),
        ("without a source", 0, true, false, false, ContentPlan::Invalid),
        ("with two", 2, false, false, true, ContentPlan::Invalid),
    ] {
        assert_eq!(plan_content(sources, bound, deleting, protected), expected, "{name}");
    }
}
