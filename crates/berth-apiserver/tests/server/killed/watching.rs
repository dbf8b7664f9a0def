//! A watch that goes on after its server was killed, as informers do: from where it was, or from a list anew.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{PATIENCE, version_of};
use crate::http::Endpoint;

/// What a watch knows.
#[derive(Debug, Default)]
pub(crate) struct Model {
    objects: BTreeMap<String, u64>,
    /// Up to here it knows everything.
    pub(crate) version: u64,
    /// How often it went on where it was.
    pub(crate) resumed: usize,
    /// How often it was told to list anew.
    pub(crate) expired: usize,
}

enum Step {
    Went,
    Expired,
}

impl Model {
    fn take(&mut self, line: &[u8]) -> Step {
        let event: Value = serde_json::from_slice(line).unwrap();
        let object = &event["object"];
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let version = version_of(object);
        match event["type"].as_str().unwrap() {
            "ERROR" => {
                assert_eq!((&object["code"], &object["reason"]), (&json!(410), &json!("Expired")));
                return Step::Expired;
            }
            "BOOKMARK" => assert!(version >= self.version),
            kind => {
                assert!(version > self.version, "{kind} of {name}: from {} to {version}", self.version);
                let known = match kind {
                    "DELETED" => self.objects.remove(&name),
                    _ => self.objects.insert(name.clone(), version),
                };
                assert_eq!(known.is_none(), kind == "ADDED", "{kind} of {name}");
            }
        }
        self.version = version;
        Step::Went
    }

    async fn relist(&mut self, endpoint: &Endpoint, collection: &str) -> std::io::Result<()> {
        let list = endpoint.connect().await?.get(collection).await?.json();
        assert!(version_of(&list) >= self.version);
        self.version = version_of(&list);
        self.objects = list["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|object| (object["metadata"]["name"].as_str().unwrap().to_owned(), version_of(object)))
            .collect();
        Ok(())
    }

    /// Follows the server until it is gone, or until it told of the object called `last`.
    async fn run(&mut self, endpoint: &Endpoint, collection: &str, last: &str) -> std::io::Result<()> {
        if self.version == 0 {
            self.relist(endpoint, collection).await?;
        }
        let mut is_first = true;
        loop {
            let path =
                format!("{collection}?watch=true&allowWatchBookmarks=true&resourceVersion={}", self.version);
            let mut lines = endpoint.connect().await?.watch(&path).await?;
            while let Some(line) = lines.next().await? {
                match self.take(&line) {
                    Step::Went if is_first => self.resumed += 1,
                    Step::Went => {}
                    Step::Expired => {
                        self.expired += 1;
                        self.relist(endpoint, collection).await?;
                        is_first = false;
                        break;
                    }
                }
                is_first = false;
                if self.objects.contains_key(last) {
                    return Ok(());
                }
            }
            if self.objects.contains_key(last) {
                return Ok(());
            }
        }
    }

    /// Checks that the watch, once it has seen the newest object, knows exactly what is there.
    pub(crate) async fn catches_up(mut self, endpoint: &Endpoint, collection: &str) {
        let mut connection = endpoint.connect().await.unwrap();
        let last = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "the-last" } });
        assert_eq!(connection.json("POST", collection, &last).await.unwrap().status, 201);
        let run = self.run(endpoint, collection, "the-last");
        tokio::time::timeout(PATIENCE, run).await.unwrap().unwrap();
        let mut listed = Self::default();
        listed.relist(endpoint, collection).await.unwrap();
        assert_eq!((self.objects, self.version), (listed.objects, listed.version));
    }
}

/// Follows a collection until the server is gone.
pub(crate) async fn follow(endpoint: Endpoint, collection: &'static str, mut model: Model) -> Model {
    // However it ends: the server was killed.
    let _ = model.run(&endpoint, collection, "").await;
    model
}
