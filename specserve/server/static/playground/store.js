// Conversations kept in the browser, one entry each; pages of other servers on the same host and port have other paths.

export class Store {
  // `storage`: localStorage, or null where the browser has none for this page.
  constructor(storage, path) {
    Object.assign(this, { storage, prefix: `specserve ${path} ` });
  }

  // { id, title, updated, turns } of all, the newest first. What cannot be read is not ours to show.
  all() {
    const found = [];
    for (let index = 0; index < (this.storage?.length ?? 0); index++) {
      const name = this.storage.key(index);
      if (name.startsWith(this.prefix)) found.push(this.load(name.slice(this.prefix.length)));
    }
    return found.filter(Boolean).sort((one, other) => (one.updated < other.updated ? 1 : -1));
  }

  load(id) {
    try {
      const read = JSON.parse(this.storage.getItem(this.prefix + id));
      return read && Array.isArray(read.turns) ? read : null;
    } catch {
      return null;
    }
  }

  // Throws Error, to be told, where there is no room.
  save(conversation) {
    if (!this.storage) throw new Error("The browser lets this page keep nothing.");
    try {
      this.storage.setItem(this.prefix + conversation.id, JSON.stringify(conversation));
    } catch (error) {
      throw new Error(`The conversation could not be kept: ${error.message} Delete some, or export it.`, { cause: error });
    }
  }

  remove(id) {
    this.storage?.removeItem(this.prefix + id);
  }
}

export function browserStorage() {
  try {
    return globalThis.localStorage;
  } catch {
    return null; // forbidden by the browser's settings
  }
}
