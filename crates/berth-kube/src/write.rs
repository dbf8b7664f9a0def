//! Reads and writes by request. Each write changes only what the caller changed, and only if nobody else changed the
//! object meanwhile.
//!
//! Requests and answers are bytes: what is generic here is small, and compiled once for a kind ([`crate::kinds!`]).

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::Request;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::request::Request as Requests;
use serde_json::{Map, Value, json};

use crate::cache::revision;
use crate::cluster::{Cluster, Observer, Selector, trimmed};
use crate::kind::{Change, Kind};
use crate::watch::{PAGE, Page};
use crate::{Error, Key, Result};

/// How long an API server works on a request at most.
const LONGEST: Duration = Duration::from_secs(60);
/// How often an edit is made again at once when somebody else was quicker.
const EDIT_TRIES: u32 = 5;

impl Cluster {
    /// Changes an object's metadata or spec: sends what `change` changed, refused (conflict) if the object is not as
    /// `before` any more: for what was decided by the rest of the object. Nothing is sent when nothing changed.
    pub fn update<K: Kind>(&self, before: &K, change: impl FnOnce(&mut K)) -> BoxFuture<'_, Result<Arc<K>>> {
        let mut after = before.clone();
        change(&mut after);
        (K::operations().write)(self, "", before, after)
    }

    /// The same for an object's status.
    pub fn update_status<K: Kind>(
        &self,
        before: &K,
        change: impl FnOnce(&mut K),
    ) -> BoxFuture<'_, Result<Arc<K>>> {
        let mut after = before.clone();
        change(&mut after);
        (K::operations().write)(self, "status", before, after)
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
        (K::operations().edit)(self, "", object.clone(), Box::new(change))
    }

    /// The same for an object's status.
    pub fn edit_status<'a, K: Kind>(
        &'a self,
        object: &K,
        change: impl FnMut(&mut K) + Send + 'a,
    ) -> BoxFuture<'a, Result<Option<Arc<K>>>> {
        (K::operations().edit)(self, "status", object.clone(), Box::new(change))
    }

    /// Creates an object; an error that `is_already_exists` if there is one of that name.
    pub fn create<K: Kind>(&self, object: &K) -> BoxFuture<'_, Result<Arc<K>>> {
        (K::operations().create)(self, object)
    }

    /// Deletes an object if it still is this one (by uid); "not there" is success.
    pub fn delete<K: Kind>(&self, object: &K) -> BoxFuture<'_, Result<()>> {
        let preconditions = Preconditions { uid: object.uid(), resource_version: None };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        self.delete_with(object, &parameters)
    }

    /// Deletes an object with parameters; "not there" is success.
    pub fn delete_with<K: Kind>(&self, object: &K, parameters: &DeleteParams) -> BoxFuture<'_, Result<()>> {
        let target = Target::of::<K>(Key::of(object));
        let request = target.requests.delete(&target.key.name, parameters);
        Box::pin(self.send_delete(target, request))
    }

    /// Takes one finalizer off an object if it still is this one (by uid), whatever others change at the same time; "not
    /// there" is success. Only for kinds that Kubernetes has built in: others know no such patch.
    pub fn remove_finalizer<K: Kind>(&self, object: &K, finalizer: &str) -> BoxFuture<'_, Result<()>> {
        (K::operations().remove_finalizer)(self, object, finalizer.to_owned())
    }

    /// The object as it is now, by a request rather than from a cache: for decisions that must not rest on old data.
    pub fn fetch<K: Kind>(&self, key: &Key) -> BoxFuture<'_, Result<Option<Arc<K>>>> {
        (K::operations().fetch)(self, key.clone())
    }

    /// All objects of a kind as they are now, in a namespace or in all of them if it is empty: for decisions that must
    /// not rest on old data.
    pub fn fetch_all<K: Kind>(&self, namespace: &str) -> BoxFuture<'_, Result<Vec<K>>> {
        (K::operations().list)(self, namespace, Selector::default())
    }

    /// The same for those that a field selector chooses, such as `spec.nodeName=a`.
    pub fn fetch_where<K: Kind>(&self, namespace: &str, fields: &str) -> BoxFuture<'_, Result<Vec<K>>> {
        let selector = Selector { fields: fields.to_owned(), ..Selector::default() };
        (K::operations().list)(self, namespace, selector)
    }
}

/// What a request is about.
struct Target {
    kind: Cow<'static, str>,
    key: Key,
    requests: Requests,
}

impl Target {
    fn of<K: Kind>(key: Key) -> Self {
        let namespace = if key.namespace.is_empty() { None } else { Some(key.namespace.as_str()) };
        Self { kind: K::kind(&()), requests: Requests::new(K::url_path(&(), namespace)), key }
    }

    fn failed(&self, action: &'static str, source: kube::Error) -> Error {
        let (kind, name) = (self.kind.clone().into_owned(), self.key.to_string());
        Error::Request { action, kind, name, source: Box::new(source) }
    }

    fn encode(&self, source: serde_json::Error) -> Error {
        Error::Encode { kind: self.kind.clone().into_owned(), name: self.key.to_string(), source }
    }

    fn get(&self) -> Built {
        self.requests.get(&self.key.name, &kube::api::GetParams::default())
    }
}

/// A request, or why it could not be made.
type Built = Result<Request<Vec<u8>>, kube::core::request::Error>;

/// Takes in the answers to a request about one object.
trait Answers: Send {
    /// Keeps the first object, and puts it into the caches; false if the object has to be read again.
    fn take(&mut self, json: &[u8]) -> serde_json::Result<bool>;
    /// The key of the object that was taken, if one was.
    fn key(&self) -> Option<Key>;
}

struct Answer<'a, K> {
    cluster: &'a Cluster,
    observers: Vec<Observer<K>>,
    object: Option<Arc<K>>,
}

impl<'a, K: Kind> Answer<'a, K> {
    /// To be made before the request.
    fn new(cluster: &'a Cluster) -> Self {
        Self { cluster, observers: cluster.observers(), object: None }
    }

    fn object(self) -> Arc<K> {
        self.object.expect("an answer without an object is an error")
    }
}

impl<K: Kind> Answers for Answer<'_, K> {
    fn take(&mut self, json: &[u8]) -> serde_json::Result<bool> {
        let object = Arc::new(trimmed(K::decode(json)?));
        let is_known = self.observers.iter().all(|observer| observer.observe(&object));
        if !is_known {
            self.observers = self.cluster.observers();
        }
        self.object.get_or_insert(object);
        Ok(is_known)
    }

    fn key(&self) -> Option<Key> {
        self.object.as_ref().map(|object| Key::of(object.as_ref()))
    }
}

impl Cluster {
    /// Sends a request about one object, and has the caches know the answer.
    fn send<'a>(
        &'a self,
        action: &'static str,
        mut target: Target,
        request: Built,
        answers: &'a mut dyn Answers,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let text = self.exchange(action, &target, request).await?;
            let mut is_known = answers.take(text.as_bytes()).map_err(|source| target.encode(source))?;
            // A created object may have got its name only now.
            target.key = answers.key().unwrap_or(target.key);
            while !is_known {
                // If not: it is gone, or the watch will bring it.
                let Ok(text) = self.exchange("get", &target, target.get()).await else { break };
                is_known = answers.take(text.as_bytes()).map_err(|source| target.encode(source))?;
            }
            Ok(())
        })
    }

    async fn exchange(&self, action: &'static str, target: &Target, request: Built) -> Result<String> {
        let request = request.map_err(|source| target.failed(action, kube::Error::BuildRequest(source)))?;
        let answer = within(self.client.request_text(request)).await;
        answer.map_err(|source| target.failed(action, source))
    }

    async fn send_delete(&self, target: Target, request: Built) -> Result<()> {
        match self.exchange("delete", &target, request).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    fn patch(&self, target: &Target, subresource: &str, patch: &Patch<Value>) -> Built {
        let parameters =
            PatchParams { field_manager: Some(self.component.to_string()), ..PatchParams::default() };
        if subresource.is_empty() {
            target.requests.patch(&target.key.name, &parameters, patch)
        } else {
            target.requests.patch_subresource(subresource, &target.key.name, &parameters, patch)
        }
    }

    /// The JSON of the objects of a list, one after the other.
    async fn list_pages(
        &self,
        target: Target,
        selector: Selector,
        take: &mut (dyn FnMut(&[u8]) -> serde_json::Result<()> + Send),
    ) -> Result<()> {
        let given = |text: String| Some(text).filter(|text| !text.is_empty());
        let mut parameters = ListParams {
            field_selector: given(selector.fields),
            label_selector: given(selector.labels),
            limit: Some(PAGE),
            ..ListParams::default()
        };
        loop {
            let text = self.exchange("list", &target, target.requests.list(&parameters)).await?;
            let page: Page<'_> = serde_json::from_str(&text).map_err(|source| target.encode(source))?;
            for object in page.items.into_iter().flatten() {
                take(object.get().as_bytes()).map_err(|source| target.encode(source))?;
            }
            parameters.continue_token = page.metadata.r#continue.and_then(given);
            if parameters.continue_token.is_none() {
                return Ok(());
            }
        }
    }
}

pub(crate) fn create<'a, K: Kind>(cluster: &'a Cluster, object: &K) -> BoxFuture<'a, Result<Arc<K>>> {
    let target = Target::of::<K>(Key::of(object));
    let body = object.encode().map_err(|source| target.encode(source));
    Box::pin(async move {
        let parameters = PostParams { dry_run: false, field_manager: Some(cluster.component.to_string()) };
        let request = target.requests.create(&parameters, body?);
        let mut answer = Answer::new(cluster);
        cluster.send("create", target, request, &mut answer).await?;
        Ok(answer.object())
    })
}

pub(crate) fn fetch<K: Kind>(cluster: &Cluster, key: Key) -> BoxFuture<'_, Result<Option<Arc<K>>>> {
    let target = Target::of::<K>(key);
    let request = target.get();
    Box::pin(async move {
        let mut answer = Answer::new(cluster);
        match cluster.send("get", target, request, &mut answer).await {
            Err(error) if error.is_not_found() => Ok(None),
            sent => sent.map(|()| Some(answer.object())),
        }
    })
}

pub(crate) fn list<'a, K: Kind>(
    cluster: &'a Cluster,
    namespace: &str,
    selector: Selector,
) -> BoxFuture<'a, Result<Vec<K>>> {
    let target = Target::of::<K>(Key::new(namespace, ""));
    Box::pin(async move {
        let mut objects = Vec::new();
        let mut take = |json: &[u8]| {
            objects.push(K::decode(json)?);
            Ok(())
        };
        cluster.list_pages(target, selector, &mut take).await?;
        Ok(objects)
    })
}

/// Sends what turns `before` into `after`, if anything does.
pub(crate) fn send_difference<'a, K: Kind>(
    cluster: &'a Cluster,
    subresource: &'static str,
    before: &K,
    after: K,
) -> BoxFuture<'a, Result<Arc<K>>> {
    let target = Target::of::<K>(Key::of(before));
    let patch = (|| {
        let (old, new) = (before.encode()?, after.encode()?);
        merge_patch(&old, &new)
    })();
    Box::pin(async move {
        let Some(patch) = patch.map_err(|source| target.encode(source))? else { return Ok(Arc::new(after)) };
        let request = cluster.patch(&target, subresource, &Patch::Merge(patch));
        let mut answer = Answer::new(cluster);
        cluster.send("patch", target, request, &mut answer).await?;
        Ok(answer.object())
    })
}

pub(crate) fn edit<'a, K: Kind>(
    cluster: &'a Cluster,
    subresource: &'static str,
    object: K,
    mut change: Change<'a, K>,
) -> BoxFuture<'a, Result<Option<Arc<K>>>> {
    Box::pin(async move {
        let (key, uid) = (Key::of(&object), object.uid());
        let is_it = |now: &Arc<K>| now.uid() == uid;
        let newer = |now: &Arc<K>| is_it(now) && revision(now.as_ref()) > revision(&object);
        let mut current = cluster.known::<K>(&key).filter(newer).unwrap_or_else(|| Arc::new(object.clone()));
        let mut tries = 0;
        loop {
            tries += 1;
            let mut after = K::clone(&current);
            change(&mut after);
            match send_difference(cluster, subresource, current.as_ref(), after).await {
                Err(error) if error.is_not_found() => return Ok(None),
                Err(error) if error.is_conflict() && tries < EDIT_TRIES => {
                    let Some(now) = fetch::<K>(cluster, key.clone()).await?.filter(is_it) else {
                        return Ok(None);
                    };
                    current = now;
                }
                written => return written.map(Some),
            }
        }
    })
}

pub(crate) fn remove_finalizer<'a, K: Kind>(
    cluster: &'a Cluster,
    object: &K,
    finalizer: String,
) -> BoxFuture<'a, Result<()>> {
    let (key, uid) = (Key::of(object), object.uid());
    Box::pin(async move {
        let patch = Patch::Strategic(json!({
            "metadata": { "uid": uid, "$deleteFromPrimitiveList/finalizers": [finalizer] },
        }));
        let target = Target::of::<K>(key.clone());
        let request = cluster.patch(&target, "", &patch);
        match cluster.send("patch", target, request, &mut Answer::<K>::new(cluster)).await {
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) if error.is_conflict() => match fetch::<K>(cluster, key).await? {
                // Another one of that name, which is none of the caller's business.
                Some(other) if other.uid() != uid => Ok(()),
                _ => Err(error),
            },
            sent => sent,
        }
    })
}

/// Waits for an answer no longer than a server works on a request: one whose connection is gone without a word would be
/// waited for for ever, and whatever it is about with it.
pub(crate) async fn within<T>(request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    let answer = tokio::time::timeout(LONGEST, request).await;
    answer.unwrap_or_else(|elapsed| Err(kube::Error::Service(Box::new(elapsed))))
}

/// What turns `old` into `new` if the object still is what it was, all as JSON; `None` if they are the same.
fn merge_patch(old: &[u8], new: &[u8]) -> serde_json::Result<Option<Value>> {
    if old == new {
        return Ok(None);
    }
    let (mut old, mut new): (Value, Value) = (serde_json::from_slice(old)?, serde_json::from_slice(new)?);
    keep_unseen_annotations(&mut old, &mut new);
    let Some(mut patch) = difference(&old, new) else { return Ok(None) };
    for field in ["resourceVersion", "uid"] {
        patch["metadata"][field] = old["metadata"][field].take();
    }
    Ok(Some(patch))
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
