//! The store as its callers know it: concurrent, watched, killed, damaged and on a full disk.

mod concurrency;
mod disk;
mod kill;
mod reading;

use std::{path::Path, sync::Arc};

use berth_apiserver::store::{Change, Collection, Expect, Key, Object, Opened, Options, Store, WriteError};
use bytes::Bytes;

fn open(dir: &Path) -> (Store, Opened) {
    Store::open(dir, Options::default()).unwrap()
}

fn pods() -> Collection {
    Collection::from("pods")
}

fn pod(name: &str) -> Key {
    Key::new(pods(), "default", name)
}

/// A change that gives the object this text, with its revision where the API server has it.
fn text(text: &str) -> Change {
    let text = text.to_owned();
    Change::put(move |revision| body(&text, revision))
}

fn gone() -> Change {
    Change::delete(|revision| body("gone", revision))
}

fn body(text: &str, revision: u64) -> Bytes {
    format!(r#"{{"metadata":{{"resourceVersion":"{revision}"}},"text":"{text}"}}"#).into()
}

fn text_of(object: &Object) -> String {
    let value: serde_json::Value = serde_json::from_slice(&object.bytes).unwrap();
    assert_eq!(value["metadata"]["resourceVersion"], object.revision.to_string());
    value["text"].as_str().unwrap().to_owned()
}

async fn create(store: &Store, key: Key, content: &str) -> Arc<Object> {
    store.write(key, Expect::Absent, text(content)).await.unwrap()
}

async fn delete(store: &Store, key: Key) -> Result<Arc<Object>, WriteError> {
    store.write(key, Expect::Present, gone()).await
}
