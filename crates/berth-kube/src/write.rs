//! Writes: each changes only what the caller changed, and only if nobody else changed the object meanwhile.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::Request;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::request::Request as Requests;
use serde_json::{Map, Value, json};

use crate::cache::revision;
use crate::cluster::{Cluster, Kind, trimmed};
use crate::{Error, Key, Result};

/// How long an API server works on a request at most.
const LONGEST: Duration = Duration::from_secs(60);
/// How often an edit is made again at once when somebody else was quicker.
const EDIT_TRIES: u32 = 5;

impl Cluster {
    /// Changes an object's metadata or spec: sends what `change` changed, refused (conflict) if the object is not as
    /// `before` any more: for what was decided by the rest of the object. Nothing is sent when nothing changed.
    pub fn update<K: Kind>(&self, before: &K, change: impl FnOnce(&mut K)) -> BoxFuture<'_, Result<Arc<K>>> {
        self.patch("", before, change)
    }

    /// The same for an object's status.
    pub fn update_status<K: Kind>(
        &self,
        before: &K,
        change: impl FnOnce(&mut K),
    ) -> BoxFuture<'_, Result<Arc<K>>> {
        self.patch("status", before, change)
    }

    /// Changes an object's metadata or spec as it is now: `change` is made to the newest state known here and sent, and
    /// made anew to what the API server has if somebody else was quicker. It may be called several times, and may leave
    /// the object alone: nothing is sent when nothing changed. `None` if the object is gone, or another one of its name
    /// is there; an error that `is_conflict` if others change it all the time.
    pub fn edit<'a, K: Kind>(
        &'a self,
        object: &K,
        change: impl FnMut(&mut K) + Send + 'a,
    ) -> BoxFuture<'a, Result<Option<Arc<K>>>> {
        Box::pin(self.edit_boxed("", object.clone(), Box::new(change)))
    }

    /// The same for an object's status.
    pub fn edit_status<'a, K: Kind>(
        &'a self,
        object: &K,
        change: impl FnMut(&mut K) + Send + 'a,
    ) -> BoxFuture<'a, Result<Option<Arc<K>>>> {
        Box::pin(self.edit_boxed("status", object.clone(), Box::new(change)))
    }

    async fn edit_boxed<K: Kind>(
        &self,
        subresource: &'static str,
        object: K,
        mut change: Box<dyn FnMut(&mut K) + Send + '_>,
    ) -> Result<Option<Arc<K>>> {
        let (key, uid) = (Key::of(&object), object.uid());
        let is_it = |now: &Arc<K>| now.uid() == uid;
        let newer = |now: &Arc<K>| is_it(now) && revision(now.as_ref()) > revision(&object);
        let mut current = self.known::<K>(&key).filter(newer).unwrap_or_else(|| Arc::new(object.clone()));
        let mut tries = 0;
        loop {
            tries += 1;
            match self.patch(subresource, current.as_ref(), &mut change).await {
                Err(error) if error.is_not_found() => return Ok(None),
                Err(error) if error.is_conflict() && tries < EDIT_TRIES => {
                    let Some(now) = self.fetch::<K>(&key).await?.filter(is_it) else { return Ok(None) };
                    current = now;
                }
                written => return written.map(Some),
            }
        }
    }

    /// Creates an object; an error that `is_already_exists` if there is one of that name.
    pub async fn create<K: Kind>(&self, object: &K) -> Result<Arc<K>> {
        let key = Key::of(object);
        let body = serde_json::to_vec(object).map_err(|source| encode::<K>(&key, source))?;
        let parameters = PostParams { dry_run: false, field_manager: Some(self.component.to_string()) };
        let request = requests::<K>(&key)
            .create(&parameters, body)
            .map_err(|source| built::<K>("create", &key, source))?;
        self.send("create", &key, request).await
    }

    /// Deletes an object if it still is this one (by uid); "not there" is success.
    pub async fn delete<K: Kind>(&self, object: &K) -> Result<()> {
        let preconditions = Preconditions { uid: object.uid(), resource_version: None };
        self.delete_with(
            object,
            &DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() },
        )
        .await
    }

    /// Deletes an object with parameters; "not there" is success.
    pub async fn delete_with<K: Kind>(&self, object: &K, parameters: &DeleteParams) -> Result<()> {
        let key = Key::of(object);
        let request = requests::<K>(&key)
            .delete(&key.name, parameters)
            .map_err(|source| built::<K>("delete", &key, source))?;
        match Box::pin(within(self.client.request_text(request))).await {
            Ok(_) => Ok(()),
            Err(source) => match failed::<K>("delete", &key, source) {
                error if error.is_not_found() => Ok(()),
                error => Err(error),
            },
        }
    }

    /// Takes one finalizer off an object if it still is this one (by uid), whatever others change at the same time; "not
    /// there" is success. Only for kinds that Kubernetes has built in: others know no such patch.
    pub async fn remove_finalizer<K: Kind>(&self, object: &K, finalizer: &str) -> Result<()> {
        let key = Key::of(object);
        let patch = Patch::Strategic(json!({
            "metadata": { "uid": object.uid(), "$deleteFromPrimitiveList/finalizers": [finalizer] },
        }));
        match self.send_patch::<K>("", &key, &patch).await {
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) if error.is_conflict() => match self.fetch::<K>(&key).await? {
                // Another one of that name, which is none of the caller's business.
                Some(other) if other.uid() != object.uid() => Ok(()),
                _ => Err(error),
            },
            sent => sent.map(|_| ()),
        }
    }

    /// The object as it is now, by a request rather than from a cache: for decisions that must not rest on old data.
    pub async fn fetch<K: Kind>(&self, key: &Key) -> Result<Option<Arc<K>>> {
        match self.send("get", key, get::<K>(key)?).await {
            Ok(object) => Ok(Some(object)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn patch<K: Kind>(
        &self,
        subresource: &'static str,
        before: &K,
        change: impl FnOnce(&mut K),
    ) -> BoxFuture<'_, Result<Arc<K>>> {
        let mut after = before.clone();
        change(&mut after);
        self.send_difference(subresource, before, after)
    }

    /// Compiled once for a kind, and not for every change.
    fn send_difference<K: Kind>(
        &self,
        subresource: &'static str,
        before: &K,
        after: K,
    ) -> BoxFuture<'_, Result<Arc<K>>> {
        let key = Key::of(before);
        let patch = merge_patch(before, &after);
        Box::pin(async move {
            match patch? {
                Some(patch) => self.send_patch(subresource, &key, &Patch::Merge(patch)).await,
                None => Ok(Arc::new(after)),
            }
        })
    }

    async fn send_patch<K: Kind>(
        &self,
        subresource: &str,
        key: &Key,
        patch: &Patch<Value>,
    ) -> Result<Arc<K>> {
        let parameters =
            PatchParams { field_manager: Some(self.component.to_string()), ..PatchParams::default() };
        let requests = requests::<K>(key);
        let request = if subresource.is_empty() {
            requests.patch(&key.name, &parameters, patch)
        } else {
            requests.patch_subresource(subresource, &key.name, &parameters, patch)
        }
        .map_err(|source| built::<K>("patch", key, source))?;
        self.send("patch", key, request).await
    }

    async fn send<K: Kind>(
        &self,
        action: &'static str,
        key: &Key,
        request: Request<Vec<u8>>,
    ) -> Result<Arc<K>> {
        let mut observers = self.observers::<K>();
        let object = self.exchange::<K>(action, key, request).await?;
        let (key, mut newest) = (Key::of(object.as_ref()), object.clone());
        while !observers.iter().all(|observer| observer.observe(&newest)) {
            observers = self.observers::<K>();
            match self.exchange::<K>("get", &key, get::<K>(&key)?).await {
                Ok(now) => newest = now,
                // Gone, or the watch will tell.
                Err(_) => break,
            }
        }
        Ok(object)
    }

    async fn exchange<K: Kind>(
        &self,
        action: &'static str,
        key: &Key,
        request: Request<Vec<u8>>,
    ) -> Result<Arc<K>> {
        // Boxed: whoever writes would have to have room for all of it, in every place where it does.
        let answer = Box::pin(within(self.client.request::<K>(request))).await;
        answer.map(|object| Arc::new(trimmed(object))).map_err(|source| failed::<K>(action, key, source))
    }
}

/// What turns `before` into `after`, if it still is what it was; `None` if they are the same.
fn merge_patch<K: Kind>(before: &K, after: &K) -> Result<Option<Value>> {
    let value =
        |object: &K| serde_json::to_value(object).map_err(|source| encode::<K>(&Key::of(before), source));
    let (mut old, mut new) = (value(before)?, value(after)?);
    keep_unseen_annotations(&mut old, &mut new);
    let Some(mut patch) = difference(&old, new) else { return Ok(None) };
    patch["metadata"]["resourceVersion"] = before.resource_version().into();
    patch["metadata"]["uid"] = before.uid().into();
    Ok(Some(patch))
}

fn get<K: Kind>(key: &Key) -> Result<Request<Vec<u8>>> {
    let request = requests::<K>(key).get(&key.name, &kube::api::GetParams::default());
    request.map_err(|source| built::<K>("get", key, source))
}

/// Waits for an answer no longer than a server works on a request: one whose connection is gone without a word would be
/// waited for for ever, and whatever it is about with it.
pub(crate) async fn within<T>(request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    let answer = tokio::time::timeout(LONGEST, request).await;
    answer.unwrap_or_else(|elapsed| Err(kube::Error::Service(Box::new(elapsed))))
}

fn requests<K: Kind>(key: &Key) -> Requests {
    let namespace = if key.namespace.is_empty() { None } else { Some(key.namespace.as_str()) };
    Requests::new(K::url_path(&(), namespace))
}

fn encode<K: Kind>(key: &Key, source: serde_json::Error) -> Error {
    Error::Encode { kind: K::kind(&()).into_owned(), name: key.to_string(), source }
}

fn built<K: Kind>(action: &'static str, key: &Key, source: kube::core::request::Error) -> Error {
    failed::<K>(action, key, kube::Error::BuildRequest(source))
}

fn failed<K: Kind>(action: &'static str, key: &Key, source: kube::Error) -> Error {
    Error::Request {
        action,
        kind: K::kind(&()).into_owned(),
        name: key.to_string(),
        source: Box::new(source),
    }
}

/// Lets annotations come and go one by one: a map that looks empty here may hold what the cache does not keep.
fn keep_unseen_annotations(old: &mut Value, new: &mut Value) {
    for object in [old, new] {
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.entry("annotations").or_insert_with(|| Value::Object(Map::new()));
        }
    }
}

/// The merge patch that turns `old` into `new`; `None` if they are the same.
fn difference(old: &Value, new: Value) -> Option<Value> {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let mut changes = Map::new();
            for name in old.keys().filter(|name| !new.contains_key(*name)) {
                changes.insert(name.clone(), Value::Null);
            }
            for (name, value) in new {
                match old.get(&name) {
                    Some(known) => {
                        if let Some(change) = difference(known, value) {
                            changes.insert(name, change);
                        }
                    }
                    None => {
                        changes.insert(name, value);
                    }
                }
            }
            (!changes.is_empty()).then_some(Value::Object(changes))
        }
        (old, new) if *old == new => None,
        (_, new) => Some(new),
    }
}
