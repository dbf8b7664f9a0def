//! What is done about contents: the same steps for those of one snapshot and those of groups, with other calls.

use berth_core::names::events;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_core::names::{DRIVER_WARNING, SNAPSHOT_WARNING};
use berth_csi::{code, remarks::Remarks};
use berth_kube::timeline::Step;
use berth_kube::{Cache, Index, Key, Kind, Loop, Next, Queue, Severity, finalizers};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, SecretReference};
use kube::ResourceExt as _;
use tonic::Status;

use super::plan::{self, ObservedContent, Plan};
use super::{COMPONENT, Context, Options, poll, taken};
use crate::failure::Failure;
use crate::snapshots::SnapshotError;

/// The reason of an event that says how far something is.
const PROGRESS: &str = events::SNAPSHOT_PROGRESS;

/// What a driver is given as secrets.
pub(super) type Secrets = BTreeMap<String, String>;

/// A kind of content: what is particular to it.
pub(super) trait Content: Kind {
    /// How its snapshots are taken.
    type Class: Kind;
    /// What the driver is asked to take, but for the secrets.
    type Request: Send;
    /// What the driver says of what is taken.
    type Answer: Send + Sync;
    /// What everything is called.
    const WORDS: Words;

    /// What matters of it to the plan.
    fn observe(&self, driver: &str) -> ObservedContent;
    /// The driver that it belongs to.
    fn driver(&self) -> &str;
    /// The object that it belongs to, where people look.
    fn owner(&self) -> &ObjectReference;
    /// The class that it names.
    fn class_name(&self) -> Option<&str>;
    /// The one volume that it is of, by the driver's id.
    fn volume_handle(&self) -> Option<&str>;
    /// What could not be done, should the driver refuse to take it.
    fn taking(&self) -> String;
    /// The driver's id of what it has.
    fn handle(&self) -> Option<&str>;
    /// The driver's id of what it says something of.
    fn handle_in(said: &Self::Answer) -> &str;
    /// What to ask the driver for.
    fn request(&self, class: &Self::Class, options: &Options) -> Result<Self::Request, Failure>;
    /// When it was taken, in nanoseconds since 1970.
    fn created(&self) -> Option<i64>;
    /// What last went wrong.
    fn error(&self) -> Option<&SnapshotError>;
    /// Puts into its status what went wrong.
    fn fail(&mut self, error: SnapshotError);
    /// Puts into its status what the driver said, which has just taken it or was only asked.
    fn save(&mut self, said: &Self::Answer, just_taken: bool, now: Timestamp);
    /// Whether it can be restored from.
    fn is_ready(said: &Self::Answer) -> bool;
    /// Takes out of its status what is deleted, so that a deletion that is repeated after a crash does not call again.
    fn clear(&mut self);

    /// Takes it; gives also what the driver said beside its answer, without the progress of one that is ready.
    fn take(
        context: &Context,
        request: Self::Request,
        secrets: Secrets,
    ) -> impl Future<Output = Result<(Self::Answer, Remarks), Status>> + Send;
    /// Asks how it is.
    fn fetch_state(
        &self,
        context: &Context,
        classes: &Cache<Self::Class>,
    ) -> impl Future<Output = Result<Self::Answer, Failure>> + Send;
    /// Deletes it on the storage system.
    fn delete(&self, context: &Context, secrets: Secrets)
    -> impl Future<Output = Result<(), Failure>> + Send;
}

/// What everything is called that has to do with a kind of content.
pub(super) struct Words {
    /// What it is of.
    pub(super) what: &'static str,
    pub(super) queue: &'static str,
    /// The annotation of one that is being taken.
    pub(super) annotation: &'static str,
    pub(super) finalizer: &'static str,
    /// The annotations that name the secret and its namespace.
    pub(super) secret: (&'static str, &'static str),
    /// The names of the CSI calls that take and delete it.
    pub(super) take: &'static str,
    pub(super) delete: &'static str,
    /// The reasons of events.
    pub(super) not_taken: &'static str,
    pub(super) not_checked: &'static str,
    pub(super) not_deleted: &'static str,
}

/// Works on the contents in a cache until the cluster's shutdown.
pub(super) async fn run<C: Content>(context: Arc<Context>, contents: Cache<C>) {
    let worker = Arc::new(Worker::new(context, contents));
    let context = &worker.context;
    let work = |key: Key| {
        let worker = worker.clone();
        async move { worker.sync(&key).await }
    };
    let ours = || worker.ours.get(&()).iter().map(|content| Key::of(content.as_ref())).collect();
    let (control, workers) = (worker.control_loop(), context.options.workers);
    context.driver.run_loop(control, workers, ours, work).await;
}

struct Worker<C: Content> {
    context: Arc<Context>,
    contents: Cache<C>,
    /// The contents of this driver, under one value.
    ours: Index<C, ()>,
    /// Those that are not ready, by their class.
    by_class: Index<C, String>,
    /// The contents of this driver that have something, by its id.
    by_handle: Index<C, String>,
    classes: Cache<C::Class>,
    queue: Queue<Key>,
}

impl<C: Content> Worker<C> {
    fn new(context: Arc<Context>, contents: Cache<C>) -> Self {
        let (ours, unready, taken) = (context.name.clone(), context.name.clone(), context.name.clone());
        Self {
            ours: contents
                .index(move |content: &C| if content.driver() == ours { vec![()] } else { Vec::new() }),
            by_class: contents.index(move |content: &C| {
                let observed = content.observe(&unready);
                let class = content.class_name().map(str::to_owned);
                class.filter(|_| observed.ours && !observed.ready).into_iter().collect()
            }),
            by_handle: contents.index(move |content: &C| {
                let handle = content.handle().filter(|_| content.driver() == taken);
                handle.map(str::to_owned).into_iter().collect()
            }),
            contents,
            classes: context.cluster.cache(),
            queue: context.cluster.queue(C::WORDS.queue, context.options.retry),
            context,
        }
    }

    /// Contents of this driver, when they or their classes change.
    fn control_loop(&self) -> Loop<Key> {
        let (name, by_class) = (self.context.name.clone(), self.by_class.clone());
        Loop::new(&self.context.cluster, &self.queue)
            .subscribe(&self.contents, move |before, after| {
                let Some(after) = after else { return Vec::new() };
                let observed = after.observe(&name);
                let changed = before.is_none_or(|before| {
                    plan::matters(
                        (before.as_ref(), before.observe(&name)),
                        (after.as_ref(), observed),
                        C::WORDS.annotation,
                    )
                });
                if observed.ours && changed { vec![Key::of(after.as_ref())] } else { Vec::new() }
            })
            .subscribe(&self.classes, move |_, after| {
                let contents = after.map_or_else(Vec::new, |class| by_class.get(&class.name_any()));
                contents.iter().map(|content| Key::of(content.as_ref())).collect()
            })
            .reads(&self.context.volumes)
    }

    async fn sync(&self, key: &Key) -> Result<Next, Failure> {
        let Some(content) = self.contents.get(key) else { return Ok(Next::Done) };
        match plan::plan(content.observe(&self.context.name)) {
            Plan::Nothing => Ok(Next::Done),
            Plan::RemoveAnnotation => {
                self.remove_annotation(&content, &[]).await?;
                // A deletion may have waited for this, and our own writes do not bring the content back.
                Ok(Next::After(Duration::ZERO))
            }
            Plan::Release => self.release(&content).await,
            Plan::Create => self.create(&content).await,
            Plan::Check => self.check(&content).await,
            Plan::Delete => self.delete(&content).await,
        }
    }

    /// Asks for the snapshot or the group, for the first time or again.
    async fn create(&self, content: &Arc<C>) -> Result<Next, Failure> {
        let (reason, doing) = (C::WORDS.not_taken, format!("Failed to create {}", C::WORDS.what));
        let prepared = self.prepare(content).and_then(|prepared| {
            self.context.driver.identity_of(&self.context.name)?;
            Ok(prepared)
        });
        let (request, secret) = match prepared {
            Ok(prepared) => prepared,
            Err(failure) => return self.failed(content, reason, &doing, failure).await,
        };
        let volume = content.volume_handle().and_then(|handle| self.context.volume_of(handle));
        let (queue, again) = (self.queue.clone(), Key::of(content.as_ref()));
        let held = volume.as_ref().map(|name| self.context.driver.try_hold(name, move || queue.add(again)));
        if matches!(held, Some(None)) {
            return Ok(Next::Done);
        }
        let secrets = match self.context.secrets(secret.as_ref()).await {
            Ok(secrets) => secrets,
            Err(failure) => return self.failed(content, reason, &doing, failure).await,
        };
        // The annotation and the finalizer are one write, so what may be taken is never without a content that is kept.
        let annotated = self.context.cluster.edit(content.as_ref(), |content| {
            content.annotations_mut().insert(C::WORDS.annotation.to_owned(), "yes".to_owned());
            if content.meta().deletion_timestamp.is_none() {
                finalizers::add(content, C::WORDS.finalizer);
            }
        });
        let Some(content) = annotated.await? else { return Ok(Next::Done) };
        let begun = Instant::now();
        let made = C::take(&self.context, request, secrets).await;
        trace_call(C::WORDS.take, volume.as_deref(), begun, made.as_ref().err());
        let made = made.and_then(|(made, remarks)| Ok((self.not_of_another(made, &content)?, remarks)));
        match made {
            Ok((made, remarks)) => {
                let next = self.save(&content, &made, Some(&remarks.warnings)).await?;
                for warning in remarks.warnings {
                    self.record_for_owner(&content, Severity::Warning, DRIVER_WARNING, warning);
                }
                if let Some(words) = remarks.progress {
                    // One for each answer, so never more than it is asked, ever more seldom.
                    self.record_for_owner(&content, Severity::Normal, PROGRESS, words);
                }
                Ok(next)
            }
            Err(status) => {
                if code::is_final(status.code()) {
                    self.remove_annotation(&content, &[]).await?;
                }
                let doing = format!("{doing}: {}", content.taking());
                self.failed(&content, reason, &doing, status.into()).await
            }
        }
    }

    /// Refuses what another content has: a driver that confuses two must not have the one deleted with the other. What
    /// was asked for may exist all the same.
    fn not_of_another(&self, made: C::Answer, content: &C) -> Result<C::Answer, Status> {
        let owners = self.by_handle.get(C::handle_in(&made));
        match owners.iter().map(|owner| owner.name_any()).find(|owner| *owner != content.name_any()) {
            None => Ok(made),
            Some(owner) => Err(Status::aborted(format!(
                "the CSI driver's answer to {} is {} {:?}, which belongs to {} {owner}; this is an error of the driver",
                C::WORDS.take,
                C::WORDS.what,
                C::handle_in(&made),
                C::kind(&())
            ))),
        }
    }

    /// Everything that the request needs, but for what the secret holds.
    fn prepare(&self, content: &C) -> Result<(C::Request, Option<SecretReference>), Failure> {
        let class = class_of(content, &self.classes)?.ok_or_else(|| {
            let (what, name) = (C::WORDS.what, content.name_any());
            Failure::refused(format!("failed to take {what} {name} without a {what} class"))
        })?;
        Ok((content.request(&class, &self.context.options)?, secret_of(content)?))
    }

    /// Asks how a snapshot or a group that exists is.
    async fn check(&self, content: &Arc<C>) -> Result<Next, Failure> {
        match content.fetch_state(&self.context, &self.classes).await {
            Ok(found) => self.save(content, &found, None).await,
            Err(failure) => {
                let doing = format!("Failed to check and update {} content", C::WORDS.what);
                self.failed(content, C::WORDS.not_checked, &doing, failure).await
            }
        }
    }

    /// Saves what the driver said, removes the annotation and says when to ask again. `taken_with` are the warnings of a
    /// driver that has just taken it; they are written with the removal of the annotation, so that none is lost in a crash.
    async fn save(
        &self,
        content: &Arc<C>,
        said: &C::Answer,
        taken_with: Option<&[String]>,
    ) -> Result<Next, Failure> {
        let (now, just_taken) = (Timestamp::now(), taken_with.is_some());
        let saved =
            self.context.cluster.edit_status(content.as_ref(), |content| content.save(said, just_taken, now));
        let Some(content) = saved.await? else { return Ok(Next::Done) };
        self.remove_annotation(&content, taken_with.unwrap_or_default()).await?;
        if C::is_ready(said) {
            return Ok(Next::Done);
        }
        let age = poll::age(content.created(), taken::since_1970(now));
        Ok(Next::After(poll::pause(age, self.context.options.poll)))
    }

    async fn delete(&self, content: &Arc<C>) -> Result<Next, Failure> {
        self.context.driver.identity_of(&self.context.name)?;
        // Data is about to be deleted: what the cache says is not enough.
        let live = self.context.cluster.fetch::<C>(&Key::of(content.as_ref())).await?;
        let Some(live) = live.filter(|live| live.uid() == content.uid()) else { return Ok(Next::Done) };
        if plan::plan(live.observe(&self.context.name)) != Plan::Delete {
            // The cache has it now too, and nothing else brings it back: a status that was cleared is our own write.
            return Ok(Next::After(Duration::ZERO));
        }
        if let Err(failure) = self.call_delete(&live).await {
            let why = format!("{}{}", failure.sentence(), failure.hint());
            let text = format!("Failed to delete {}: {why}", C::WORDS.what);
            self.context.recorder.warning(live.as_ref(), C::WORDS.not_deleted, text);
            return Err(failure);
        }
        match self.context.cluster.edit_status(live.as_ref(), C::clear).await? {
            Some(content) => self.release(&content).await,
            None => Ok(Next::Done),
        }
    }

    async fn call_delete(&self, content: &C) -> Result<(), Failure> {
        // An annotation that names half a secret is as good as none.
        let secret = secret_of(content).unwrap_or(None);
        let secrets = self.context.secrets_to_delete(&content.name_any(), secret.as_ref()).await?;
        let volume = content.volume_handle().and_then(|handle| self.context.volume_of(handle));
        let begun = Instant::now();
        let deleted = content.delete(&self.context, secrets).await;
        match &deleted {
            Ok(()) => trace_call(C::WORDS.delete, volume.as_deref(), begun, None),
            Err(Failure::Call(status)) => trace_call(C::WORDS.delete, volume.as_deref(), begun, Some(status)),
            // The driver was not asked.
            Err(_) => {}
        }
        deleted
    }

    /// Records an event where people look first: on the snapshot or the group itself.
    fn record_for_owner(&self, content: &C, severity: Severity, reason: &str, message: String) {
        let owner = content.owner();
        if owner.uid.as_deref().is_some_and(|uid| !uid.is_empty()) {
            self.context.recorder.record(owner.clone(), severity, reason, message);
        }
    }

    /// Removes the annotation, and keeps what the driver warned of.
    async fn remove_annotation(&self, content: &Arc<C>, warnings: &[String]) -> Result<(), Failure> {
        self.context
            .cluster
            .edit(content.as_ref(), |content| {
                if content.annotations().contains_key(C::WORDS.annotation) {
                    content.annotations_mut().remove(C::WORDS.annotation);
                }
                if !warnings.is_empty() {
                    content.annotations_mut().insert(SNAPSHOT_WARNING.to_owned(), warnings.join("; "));
                }
            })
            .await?;
        Ok(())
    }

    async fn release(&self, content: &Arc<C>) -> Result<Next, Failure> {
        self.context
            .cluster
            .edit(content.as_ref(), |content| {
                finalizers::remove(content, C::WORDS.finalizer);
            })
            .await?;
        Ok(Next::Done)
    }

    /// Reports a failure where people look: in the status, and once by an event.
    async fn failed(
        &self,
        content: &Arc<C>,
        reason: &str,
        doing: &str,
        failure: Failure,
    ) -> Result<Next, Failure> {
        if failure.is_conflict() {
            return Err(failure);
        }
        let message = format!("{doing}: {}{}", failure.sentence(), failure.hint());
        let known = content.error().and_then(|error| error.message.as_deref());
        if known != Some(message.as_str()) {
            self.context.recorder.warning(content.as_ref(), reason, message.clone());
            self.record_for_owner(content, Severity::Warning, reason, message.clone());
        }
        let now = Timestamp::now();
        self.context
            .cluster
            .edit_status(content.as_ref(), |content| {
                content.fail(taken::error(content.error(), &message, now));
            })
            .await?;
        Err(failure)
    }
}

/// The class that a content names.
pub(super) fn class_of<C: Content>(
    content: &C,
    classes: &Cache<C::Class>,
) -> Result<Option<Arc<C::Class>>, Failure> {
    let Some(name) = content.class_name() else { return Ok(None) };
    let class = classes.named(name).ok_or_else(|| {
        let (what, content) = (C::WORDS.what, content.name_any());
        Failure::refused(format!(
            "failed to get {what} class {name} for {what} content {content}: it does not exist"
        ))
    })?;
    Ok(Some(class))
}

/// The secret that a content's annotations name; half a name is refused.
pub(super) fn secret_of<C: Content>(content: &C) -> Result<Option<SecretReference>, Failure> {
    let (name, namespace) = C::WORDS.secret;
    match (content.annotations().get(name), content.annotations().get(namespace)) {
        (Some(name), Some(namespace)) if !name.is_empty() && !namespace.is_empty() => {
            Ok(Some(SecretReference { name: Some(name.clone()), namespace: Some(namespace.clone()) }))
        }
        (Some(_), Some(_)) => Err(Failure::refused(format!(
            "cannot retrieve secrets for snapshot content: secret name or namespace not specified; correct its annotations \
             {name} and {namespace}"
        ))),
        _ => Ok(None),
    }
}

fn trace_call(call: &str, volume: Option<&str>, begun: Instant, error: Option<&Status>) {
    let step = Step { component: COMPONENT, call, volume: volume.unwrap_or_default(), ..Step::default() };
    step.ended(begun, error.map(Status::message));
}
