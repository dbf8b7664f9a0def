//! What each kind of volume is made of, what is refused, and that no path leads out.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::super::super::objects::NodeFacts;
use super::super::super::tests::{object_of, pod};
use super::*;

fn objects() -> Objects {
    let config = json!({ "data": { "a": "text", "b": "more" }, "binaryData": { "raw": "AP8=" } });
    let secret = json!({ "data": { "user": "cm9vdA==", "pass": "aHVudGVyMg==" } });
    Objects {
        config_maps: [("c".to_owned(), Arc::new(object_of(config)))].into(),
        secrets: [("s".to_owned(), Arc::new(object_of(secret)))].into(),
        node: NodeFacts { allocatable: object_of(json!({ "cpu": "4" })), ..NodeFacts::default() },
    }
}

fn token() -> Token {
    Token { token: "jwt".to_owned(), expires: Timestamp::MAX, renew: Timestamp::MAX }
}

/// Path, text, mode and owner.
type Rendered = (String, String, u32, Option<u32>);

fn rendered_for(pod: &Pod, volume: Value) -> Result<Vec<Rendered>, String> {
    let mut volume = volume;
    volume["name"] = "vol".into();
    let source = as_projected(&object_of(volume)).unwrap();
    let tree = render(pod, &source, &objects(), &[token()]).map_err(|error| error.to_string())?;
    let file = |(path, file): (String, File)| {
        (path, String::from_utf8_lossy(&file.bytes).into_owned(), file.mode, file.owner)
    };
    Ok(tree.into_iter().map(file).collect())
}

fn rendered(volume: Value) -> Result<Vec<(String, String, u32)>, String> {
    let files = rendered_for(&pod(json!({})), volume)?;
    Ok(files.into_iter().map(|(path, text, mode, _)| (path, text, mode)).collect())
}

#[expect(clippy::unnecessary_wraps, reason = "it is compared with what rendering gives")]
fn files(list: &[(&str, &str, u32)]) -> Result<Vec<(String, String, u32)>, String> {
    Ok(list.iter().map(|(path, text, mode)| ((*path).to_owned(), (*text).to_owned(), *mode)).collect())
}

#[test]
fn all_keys_are_files_unless_items_choose() {
    for (volume, expected) in [
        (
            json!({ "configMap": { "name": "c" } }),
            files(&[("a", "text", 0o644), ("b", "more", 0o644), ("raw", "\0\u{fffd}", 0o644)]),
        ),
        (
            json!({ "configMap": { "name": "c", "defaultMode": 0o400, "items": [
            { "key": "a", "path": "x/y" }, { "key": "raw", "path": "./x//z", "mode": 0o777 }] } }),
            files(&[("x/y", "text", 0o400), ("x/z", "\0\u{fffd}", 0o777)]),
        ),
        (
            json!({ "secret": { "secretName": "s", "defaultMode": 0o440 } }),
            files(&[("pass", "hunter2", 0o440), ("user", "root", 0o440)]),
        ),
        (
            json!({ "secret": { "secretName": "s", "items": [{ "key": "user", "path": "u" }] } }),
            files(&[("u", "root", 0o644)]),
        ),
        (json!({ "secret": { "secretName": "gone", "optional": true } }), files(&[])),
        (
            json!({ "configMap": { "name": "gone", "optional": true, "items": [{ "key": "a", "path": "a" }] } }),
            files(&[]),
        ),
        (
            json!({ "configMap": { "name": "c", "optional": true, "items": [
            { "key": "gone", "path": "g" }, { "key": "b", "path": "b" }] } }),
            files(&[("b", "more", 0o644)]),
        ),
        (
            json!({ "downwardAPI": { "defaultMode": 0o600, "items": [
            { "path": "name", "fieldRef": { "fieldPath": "metadata.name" } },
            { "path": "cpu", "mode": 0o444, "resourceFieldRef": { "containerName": "main", "resource": "limits.cpu" } }] } }),
            files(&[("cpu", "4", 0o444), ("name", "pod", 0o600)]),
        ),
        (
            json!({ "projected": { "defaultMode": 0o440, "sources": [
            { "configMap": { "name": "c", "items": [{ "key": "a", "path": "both" }] } },
            { "secret": { "name": "s", "items": [{ "key": "user", "path": "both", "mode": 0o400 }] } },
            { "downwardAPI": { "items": [{ "path": "d/ns", "fieldRef": { "fieldPath": "metadata.namespace" } }] } },
            { "serviceAccountToken": { "path": "token" } }] } }),
            files(&[("both", "root", 0o400), ("d/ns", "ns", 0o440), ("token", "jwt", 0o440)]),
        ),
        (json!({ "projected": {} }), files(&[])),
    ] {
        assert_eq!(rendered(volume.clone()), expected, "{volume}");
    }
}

#[test]
fn what_is_missing_is_named_in_the_kubelets_words() {
    for (volume, expected) in [
        (json!({ "configMap": { "name": "gone" } }), "configmap \"gone\" not found"),
        (json!({ "secret": { "secretName": "gone" } }), "secret \"gone\" not found"),
        (
            json!({ "configMap": { "name": "c", "items": [{ "key": "k", "path": "p" }] } }),
            "configmap references non-existent config key: k: add it to configmap \"c\", or mark the volume optional",
        ),
        (
            json!({ "secret": { "secretName": "s", "items": [{ "key": "k", "path": "p" }] } }),
            "references non-existent secret key: k: add it to secret \"s\", or mark the volume optional",
        ),
        (
            json!({ "downwardAPI": { "items": [{ "path": "p", "fieldRef": { "fieldPath": "status.podIP" } }] } }),
            "unsupported fieldPath: status.podIP",
        ),
        (
            json!({ "projected": { "sources": [{ "secret": { "name": "x" } }, { "configMap": { "name": "y" } }] } }),
            "[secret \"x\" not found, configmap \"y\" not found]",
        ),
        (
            json!({ "projected": { "sources": [{ "clusterTrustBundle": { "path": "p" } }] } }),
            "a projected volume cannot hold a clusterTrustBundle yet: Berth does not serve that kind",
        ),
        (
            json!({ "projected": { "sources": [{ "podCertificate": { "keyType": "ED25519", "signerName": "a/b" } }] } }),
            "a projected volume cannot hold a podCertificate yet: Berth does not serve that kind",
        ),
        (
            json!({ "configMap": { "name": "c", "items": [{ "key": "a", "path": "x" }, { "key": "b", "path": "x/y/z" }] } }),
            "invalid path: x would be both a file and a directory",
        ),
    ] {
        assert_eq!(rendered(volume.clone()), Err(expected.to_owned()), "{volume}");
    }
}

#[test]
fn no_path_leads_out_of_the_volume_or_into_its_workings() {
    let (name, path) = ("n".repeat(256), "p/".repeat(2049));
    for (path, expected) in [
        ("", "must not be empty: \"\""),
        (".", "must not be empty: \".\""),
        ("././/", "must not be empty: \"././/\""),
        ("/etc/passwd", "must be relative path: /etc/passwd"),
        ("..", "must not contain '..': .."),
        ("../a", "must not contain '..': ../a"),
        ("a/../../b", "must not contain '..': a/../../b"),
        ("a/..", "must not contain '..': a/.."),
        ("..data", "must not start with '..': ..data"),
        ("./..data", "must not start with '..': ./..data"),
        ("..data/a", "must not start with '..': ..data/a"),
        ("..2026_01_01_00_00_00.1/a", "must not start with '..': ..2026_01_01_00_00_00.1/a"),
        ("a\0b", "must not contain a NUL byte: \"a\\0b\""),
        (&name, "filenames must be less than or equal to 255 characters"),
        (&path, "must be less than or equal to 4096 characters"),
    ] {
        let volume = json!({ "configMap": { "name": "c", "items": [{ "key": "a", "path": path }] } });
        assert_eq!(rendered(volume), Err(format!("invalid path: {expected}")), "{path:?}");
    }
    for path in ["a/..b", "...", "a..", ".hidden"] {
        let volume = json!({ "configMap": { "name": "c", "items": [{ "key": "a", "path": path }] } });
        let refused = path.starts_with("..");
        assert_eq!(rendered(volume).is_err(), refused, "{path:?}");
    }
}

#[test]
fn keys_of_objects_are_checked_like_paths() {
    let hostile = json!({ "data": { "../../escape": "x" } });
    let objects =
        Objects { config_maps: [("c".to_owned(), Arc::new(object_of(hostile)))].into(), ..objects() };
    let source = as_projected(&object_of(json!({ "name": "vol", "configMap": { "name": "c" } }))).unwrap();
    let error = render(&pod(json!({})), &source, &objects, &[]).unwrap_err();
    assert_eq!(error.to_string(), "invalid path: must not contain '..': ../../escape");
}

#[test]
fn a_token_is_its_users_or_its_groups_alone() {
    let volume = json!({ "projected": { "sources": [
        { "serviceAccountToken": { "path": "token" } },
        { "configMap": { "name": "c", "items": [{ "key": "a", "path": "a" }] } }] } });
    for (context, mode, owner) in [
        (json!({}), 0o644, None),
        (json!({ "fsGroup": 5 }), 0o600, None),
        (json!({ "runAsUser": 7 }), 0o600, Some(7)),
        (json!({ "runAsUser": 7, "fsGroup": 5 }), 0o600, Some(7)),
    ] {
        let pod = pod(json!({ "securityContext": context }));
        let expected = vec![
            ("a".to_owned(), "text".to_owned(), 0o644, None),
            ("token".to_owned(), "jwt".to_owned(), mode, owner),
        ];
        assert_eq!(rendered_for(&pod, volume.clone()), Ok(expected), "{context}");
    }
}

#[test]
fn debug_shows_no_content() {
    let source = as_projected(&object_of(json!({ "name": "vol", "secret": { "secretName": "s" } }))).unwrap();
    let tree = render(&pod(json!({})), &source, &objects(), &[]).unwrap();
    let shown = format!("{tree:?}");
    assert!(shown.contains("pass") && !shown.contains("hunter2") && !shown.contains("104, 117"), "{shown}");
}
