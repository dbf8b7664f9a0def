//! Sets of fields, in the form `managedFields` has them: a tree whose edges are fields (`f:`), keyed items (`k:`), values
//! of sets (`v:`) and indexes (`i:`).

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// A set of paths; a path may be a member without those below it, and the other way round.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct FieldSet {
    nodes: BTreeMap<String, Node>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Node {
    member: bool,
    below: FieldSet,
}

impl Node {
    fn is_empty(&self) -> bool {
        !self.member && self.below.is_empty()
    }
}

/// The edge to a field.
pub(super) fn field(name: &str) -> String {
    format!("f:{name}")
}

/// The edge to an item of a keyed list.
pub(super) fn key(keys: Map<String, Value>) -> String {
    format!("k:{}", escaped(&Value::Object(keys)))
}

/// The edge to a value of a set.
pub(super) fn value(value: &Value) -> String {
    format!("v:{}", escaped(value))
}

/// JSON with the characters escaped that Go escapes: the text is a key, so it has to be the same.
fn escaped(value: &Value) -> String {
    let text = value.to_string();
    if !text.contains(['<', '>', '&', '\u{2028}', '\u{2029}']) {
        return text;
    }
    text.replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

/// An edge as messages write it: `.name`, `[name="a"]`, `[="a"]`, `[0]`.
pub(super) fn display(edge: &str) -> String {
    match edge.split_at_checked(2) {
        Some(("f:", name)) => format!(".{name}"),
        Some(("k:", keys)) => {
            let keys: Map<String, Value> = serde_json::from_str(keys).unwrap_or_default();
            let keys: Vec<_> = keys.iter().map(|(name, value)| format!("{name}={value}")).collect();
            format!("[{}]", keys.join(","))
        }
        Some(("v:", value)) => format!("[={value}]"),
        Some(("i:", index)) => format!("[{index}]"),
        _ => edge.to_owned(),
    }
}

impl FieldSet {
    /// Reads `fieldsV1`; `None` when it is not a set of fields.
    pub(super) fn read(fields: &Value) -> Option<Self> {
        let mut set = Self::default();
        for (edge, below) in fields.as_object()? {
            if edge == "." {
                continue;
            }
            let own = below.as_object()?;
            // A leaf is a member by being there, an inner node by a dot in it.
            let member = own.is_empty() || own.contains_key(".");
            set.nodes.insert(canonical(edge)?, Node { member, below: Self::read(below)? });
        }
        Some(set)
    }

    /// The set in the form of `fieldsV1`: what [`Self::read`] reads.
    pub(super) fn write(&self) -> Value {
        let mut fields = Map::new();
        for (edge, node) in &self.nodes {
            let mut below = node.below.write();
            if let (true, false, Value::Object(inner)) = (node.member, node.below.is_empty(), &mut below) {
                inner.insert(".".to_owned(), json!({}));
            }
            fields.insert(edge.clone(), below);
        }
        Value::Object(fields)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    pub(super) fn insert(&mut self, path: &[String]) {
        let Some((last, parents)) = path.split_last() else { return };
        let mut set = self;
        for edge in parents {
            set = &mut set.nodes.entry(edge.clone()).or_default().below;
        }
        set.nodes.entry(last.clone()).or_default().member = true;
    }

    /// Whether the path of one edge is a member.
    pub(super) fn has(&self, edge: &str) -> bool {
        self.nodes.get(edge).is_some_and(|node| node.member)
    }

    /// Whether the path is a member.
    pub(super) fn has_path(&self, path: &[String]) -> bool {
        match path.split_first() {
            None => false,
            Some((edge, [])) => self.has(edge),
            Some((edge, rest)) => self.below(edge).is_some_and(|below| below.has_path(rest)),
        }
    }

    /// What is below an edge, if anything.
    pub(super) fn below(&self, edge: &str) -> Option<&Self> {
        self.nodes.get(edge).map(|node| &node.below).filter(|below| !below.is_empty())
    }

    /// The edges that lead on, and what is below them.
    pub(super) fn edges(&self) -> impl Iterator<Item = (&str, bool, &Self)> {
        self.nodes.iter().map(|(edge, node)| (edge.as_str(), node.member, &node.below))
    }

    /// Adds an edge with what is below it.
    pub(super) fn put(&mut self, edge: &str, member: bool, below: Self) {
        let node = Node { member, below };
        if !node.is_empty() {
            self.nodes.insert(edge.to_owned(), node);
        }
    }

    pub(super) fn union(&self, other: &Self) -> Self {
        let mut union = self.clone();
        for (edge, node) in &other.nodes {
            let own = union.nodes.entry(edge.clone()).or_default();
            own.member |= node.member;
            own.below = own.below.union(&node.below);
        }
        union
    }

    pub(super) fn intersection(&self, other: &Self) -> Self {
        let mut common = Self::default();
        for (edge, node) in &self.nodes {
            if let Some(theirs) = other.nodes.get(edge) {
                common.put(edge, node.member && theirs.member, node.below.intersection(&theirs.below));
            }
        }
        common
    }

    /// The members that are no members of the other set.
    pub(super) fn difference(&self, other: &Self) -> Self {
        let mut rest = Self::default();
        for (edge, node) in &self.nodes {
            match other.nodes.get(edge) {
                None => rest.put(edge, node.member, node.below.clone()),
                Some(theirs) => {
                    rest.put(edge, node.member && !theirs.member, node.below.difference(&theirs.below));
                }
            }
        }
        rest
    }

    /// The members that are neither members of the other set nor below one.
    pub(super) fn without(&self, other: &Self) -> Self {
        let mut rest = Self::default();
        for (edge, node) in &self.nodes {
            match other.nodes.get(edge) {
                None => rest.put(edge, node.member, node.below.clone()),
                Some(theirs) if theirs.member => {}
                Some(theirs) => rest.put(edge, node.member, node.below.without(&theirs.below)),
            }
        }
        rest
    }

    /// All members' paths: those of a level before those below.
    pub(super) fn paths(&self) -> Vec<Vec<String>> {
        let mut paths: Vec<Vec<String>> =
            self.nodes.iter().filter(|(_, node)| node.member).map(|(edge, _)| vec![edge.clone()]).collect();
        for (edge, node) in &self.nodes {
            paths.extend(node.below.paths().into_iter().map(|mut path| {
                path.insert(0, edge.clone());
                path
            }));
        }
        paths
    }
}

/// An edge in the one form we compare by.
fn canonical(edge: &str) -> Option<String> {
    let (kind, rest) = edge.split_at_checked(2)?;
    match kind {
        "f:" => Some(edge.to_owned()),
        "k:" => Some(key(serde_json::from_str(rest).ok()?)),
        "v:" => Some(value(&serde_json::from_str(rest).ok()?)),
        "i:" => rest.parse::<i64>().ok().map(|_| edge.to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(fields: &Value) -> FieldSet {
        FieldSet::read(fields).unwrap()
    }

    #[test]
    fn a_set_is_written_as_it_was_read() {
        let fields = json!({"f:metadata": {"f:labels": {".": {}, "f:a": {}}, "f:finalizers": {"v:\"x\"": {}}},
            "f:spec": {"f:ports": {"k:{\"containerPort\":80,\"protocol\":\"TCP\"}": {".": {}, "f:name": {}}}}});
        assert_eq!(set(&fields).write(), fields);
        assert!(set(&fields).has_path(&["f:metadata".into(), "f:labels".into()]));
        assert!(!set(&fields).has_path(&["f:metadata".into()]));
    }

    #[test]
    fn other_things_are_not_sets() {
        for fields in [json!([]), json!({"x:a": {}}), json!({"f:a": 1}), json!({"k:a": {}}), json!({"é": {}})]
        {
            assert!(FieldSet::read(&fields).is_none(), "{fields}");
        }
    }

    #[test]
    fn sets_are_combined_member_by_member() {
        let left = set(&json!({"f:a": {".": {}, "f:b": {}}, "f:c": {}}));
        let right = set(&json!({"f:a": {"f:b": {}}, "f:d": {}}));
        assert_eq!(left.difference(&right).write(), json!({"f:a": {}, "f:c": {}}));
        assert_eq!(left.intersection(&right).write(), json!({"f:a": {"f:b": {}}}));
        assert_eq!(left.union(&right).write(), json!({"f:a": {".": {}, "f:b": {}}, "f:c": {}, "f:d": {}}));
        assert_eq!(left.without(&set(&json!({"f:a": {}}))).write(), json!({"f:c": {}}));
    }

    #[test]
    fn paths_are_written_for_people() {
        let path = ["f:spec", "k:{\"name\":\"a\",\"port\":1}", "v:\"x\"", "i:3"].map(display).concat();
        assert_eq!(path, ".spec[name=\"a\",port=1][=\"x\"][3]");
    }
}
