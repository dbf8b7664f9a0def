//! The table of types is what the generator makes of the published types today.

use super::peer::{go, openapi};

#[test]
fn the_table_is_what_the_published_types_say() {
    let ours = include_str!("../../../src/schema/kubernetes.types");
    let output = go(&["run", "."]).arg(openapi()).output().expect("go runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let published = String::from_utf8(output.stdout).expect("the table is text");
    assert!(published.lines().count() > 2000, "the published types were not read");
    let differences: Vec<_> =
        ours.lines().zip(published.lines()).filter(|(ours, published)| ours != published).take(10).collect();
    assert!(ours == published, "run `go run . DIRECTORY` in generate/; first differences: {differences:#?}");
}
